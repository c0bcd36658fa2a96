"""Streams of bounded length, made at the model's own pace however slow the client is."""

from __future__ import annotations

import asyncio
from tempfile import SpooledTemporaryFile

from starlette.types import Receive, Scope, Send

from deployments.api.live import EVENTS, LiveStream

IN_MEMORY = 1 << 20  # of what the client has not taken yet; more of it lies in a temporary file
AT_ONCE = 64 * 1024


class StreamAhead(LiveStream):
    """A stream whose flow does not wait for the client, so that a paused player holds no model's slot.

    Only for answers whose length the request bounds: all of one may come to lie in a temporary file.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._taken, self._whole, self._news = 0, False, asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        with SpooledTemporaryFile(IN_MEMORY) as self._made:
            try:
                await super().__call__(scope, receive, send)
            finally:
                if self._sending is not None:
                    self._sending.cancel()
                    await asyncio.wait({self._sending})

    async def start(self, content_type: str = EVENTS) -> None:
        await super().start(content_type)
        self._sending = asyncio.create_task(self._send_on())

    async def write(self, data: bytes, more: bool = True) -> None:
        self._made.seek(0, 2)
        self._made.write(data)
        self._whole = not more
        self._news.set()
        if self._whole and self._sending is not None:
            await self._sending

    async def _send_on(self) -> None:
        while True:
            self._news.clear()
            whole = self._whole
            self._made.seek(self._taken)
            data = self._made.read(AT_ONCE)
            self._taken += len(data)
            if data or whole:
                await super().write(data, more=bool(data))
            if whole and not data:
                return
            if not data:
                await self._news.wait()
