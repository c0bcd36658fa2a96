"""Tokens into text as they come: whole characters only, and together exactly the text of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"


class Detokeniser:
    """Holds back tokens that end within a character. `decode` turns tokens into text.

    Tokens are decoded together with those before them, because some tokenizers drop the space of a
    first token. Example:
        >>> words = Detokeniser(lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> words.feed(0xC3), words.feed(0xA9)
        ('', 'é')
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # where the tokens begin that are decoded along with new ones
        self._shown = 0

    @property
    def held(self) -> int:
        """Tokens whose text has not been given yet."""
        return len(self._tokens) - self._shown

    def feed(self, token: int) -> str:
        """The text that is complete with `token`."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(BROKEN):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back, less a character that will never be complete."""
        text = self._new().rstrip(BROKEN)
        self._context, self._shown = self._shown, len(self._tokens)
        return text

    def _new(self) -> str:
        before = self._decode(self._tokens[self._context : self._shown])
        return self._decode(self._tokens[self._context :])[len(before) :]
