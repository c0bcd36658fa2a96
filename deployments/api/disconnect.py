"""Notice that a client has left, and stop working for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from blocks.errors import Cancelled

AFTER_S = 0.02  # what is answered sooner is not worth watching, which costs as much as the rest of our work


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
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(AFTER_S, self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watch is None:
            return
        self._watch.cancel()
        # Cancelled from elsewhere as well (the server stops): then that goes on.
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise Cancelled("the client left") from error

    def _begin(self) -> None:
        self._watch = self._task.get_loop().create_task(self._watch_for_disconnect())

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()
