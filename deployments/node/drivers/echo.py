"""Says the last user message back, word by word, at a set pace. For tests, benchmarks and first steps."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator

from pydantic import BaseModel, ConfigDict, Field

from blocks.catalogue import Model
from deployments.node.drivers.base import ChatDriver, End, Piece, Prompt
from deployments.node.drivers.options import read_options
from tasks.protocol.shapes import ChatParameters

TURN = 16  # words after which others may have their turn
WORD = re.compile(r"\s*\S+|\s+")


class EchoOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    tokens_per_second: float = Field(0, ge=0, description="0: as fast as possible")
    load_s: float = Field(0, ge=0, description="seconds that loading takes")
    crash_on: str = Field("", description="the process kills itself when it is to say a word with this")


class EchoDriver(ChatDriver):
    """A token is a word."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.options = EchoOptions()

    def load(self) -> None:
        self.options = read_options(self.model, EchoOptions)
        time.sleep(self.options.load_s)

    async def run(
        self, parameters: ChatParameters, cancelled: threading.Event
    ) -> AsyncIterator[Prompt | Piece | End]:
        self.counters["calls"] += 1
        asked = [message.content for message in parameters.messages if message.role == "user"]
        words = WORD.findall(asked[-1] if asked else parameters.messages[-1].content)
        prompt = sum(len(message.content.split()) for message in parameters.messages)
        limit = len(words) if parameters.max_tokens is None else parameters.max_tokens
        with self.counting(cancelled):
            yield Prompt(prompt)
            started = time.monotonic()
            for number, word in enumerate(words[:limit]):
                await self._pace(started, number)
                if self.options.crash_on and self.options.crash_on in word:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.counters["tokens"] += 1
                yield Piece(word)
            yield End("length" if limit < len(words) else "stop", prompt, min(limit, len(words)))

    async def _pace(self, started: float, number: int) -> None:
        if pace := self.options.tokens_per_second:
            await asyncio.sleep(started + number / pace - time.monotonic())
        elif number % TURN == TURN - 1:
            await asyncio.sleep(0)
