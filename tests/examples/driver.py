"""A driver of your own: a chat model that shouts."""

import threading
from collections.abc import Iterator

from deployments.node.drivers.base import ChatDriver, End, Piece, Prompt
from tasks.protocol.shapes import ChatParameters


class ShoutDriver(ChatDriver):
    def load(self) -> None:
        """Bring weights into memory here; `self.model` is the catalogue's entry."""

    def run(self, parameters: ChatParameters, cancelled: threading.Event) -> Iterator[Prompt | Piece | End]:
        words = parameters.messages[-1].content.upper().split(" ")
        yield Prompt(len(words))
        for word in words:
            if cancelled.is_set():
                return
            yield Piece(f"{word} ")
        yield End("stop", prompt_tokens=len(words), completion_tokens=len(words))
