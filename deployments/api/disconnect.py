"""Notice that a client has left, and stop working for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from blocks.errors import Cancelled


class ClientPresent:
    """Within it, the client is there: when it leaves, what runs inside is cancelled.

    Enter it when the request's body has been read. Nothing between the server and here may read or
    wrap `receive` in a way that keeps the disconnect to itself.

    Raises:
        Cancelled: on leaving the block, if that is why it ended.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._watch_for_disconnect())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        # Cancelled from elsewhere as well (the server stops): then that goes on.
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise Cancelled("the client left") from error

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
