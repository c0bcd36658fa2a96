"""Chat: deltas as they are made, cut at stop sequences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from blocks.errors import UpstreamFailed
from deployments.node.adapters.base import Adapter, Emit
from deployments.node.bridge import driving
from deployments.node.drivers.base import ChatDriver, End, Prompt
from tasks.protocol.inference_pb2 import Done, Event, Text, Usage
from tasks.protocol.shapes import ChatParameters, ChatResult


class StopCutter:
    """Cuts a text in pieces at the first stop sequence; holds back only what may be the beginning of one.

    Example:
        >>> cutter = StopCutter(["END"])
        >>> cutter.feed("one E"), cutter.feed("N"), cutter.feed("D two")
        ('one ', '', '')
        >>> cutter.found
        True
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """The text that may be shown now."""
        if not self._stops:
            return piece
        text = self._held + piece
        cuts = [at for at in map(text.find, self._stops) if at >= 0]
        if cuts:
            self.found, self._held = True, ""
            return text[: min(cuts)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class ChatAdapter(Adapter[ChatDriver, ChatParameters]):
    """OpenAI's chat completion over any `ChatDriver`. `Done.result` is a `ChatResult`."""

    shape = ChatParameters

    async def run(self, parameters: ChatParameters, media: AsyncIterator[bytes], emit: Emit | None) -> Done:
        cutter = StopCutter(parameters.stop or ())
        texts: list[str] = []
        prompt_tokens = tokens = shown_tokens = 0
        end: End | None = None
        async with driving(partial(self.driver.run, parameters)) as items:
            async for item in items:
                if isinstance(item, Prompt):
                    prompt_tokens = item.tokens
                    continue
                if isinstance(item, End):
                    end, text = item, cutter.rest()
                else:
                    tokens, text = tokens + item.tokens, cutter.feed(item.text)
                if text:
                    texts.append(text)
                    if emit is not None:
                        await emit(Event(text=Text(text=text, tokens=tokens - shown_tokens)))
                        shown_tokens = tokens
                if end is not None or cutter.found:
                    break
        if end is None:
            if not cutter.found:
                raise UpstreamFailed(f"model {self.driver.model.name} broke off its answer; try again")
            end = End("stop", prompt_tokens, tokens)
        return Done(
            finish_reason=end.finish_reason,
            result=ChatResult(text="".join(texts)).model_dump_json().encode(),
            usage=Usage(prompt_tokens=end.prompt_tokens, completion_tokens=end.completion_tokens),
        )
