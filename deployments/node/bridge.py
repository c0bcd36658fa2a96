"""From a driver's generator, in a thread or on the loop, to asyncio: items in order, and cancellation back.

A plain generator runs in a thread of its own, a little ahead of its reader. Leaving the `driving` block
ends the driver and waits until it has really ended, so that a slot held around the block is never given
away while the model still works.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")
AHEAD = 256  # pieces of text and the like are small


@asynccontextmanager
async def driving(
    start: Callable[[threading.Event], Iterator[T] | AsyncIterator[T]],
    ahead: int = AHEAD,
) -> AsyncIterator[AsyncIterator[T]]:
    """The items of one call of a driver's `run`; `start` gets the event that tells it to stop.

    Leave the block early to end the driver. A plain generator is told by the event; an async one is
    closed, with the event set when the block is left by an exception (cancellation is one).

    Args:
        ahead: items that a plain generator may be ahead of a slow reader.

    Example:
        async with driving(partial(self.driver.run, parameters)) as items:
            async for item in items: ...
    """
    cancelled = threading.Event()
    source = start(cancelled)
    if isinstance(source, AsyncGenerator):
        items: Any = source
    elif isinstance(source, Iterator):
        items = _Thread(source, cancelled, ahead).items()
    else:
        raise TypeError(f"a driver's run must be a generator or an async generator, not {type(source)}")
    async with aclosing(items):
        try:
            yield items
        except BaseException:
            cancelled.set()
            raise


class _Thread(Generic[T]):
    """One plain generator in one thread."""

    def __init__(self, source: Iterator[T], cancelled: threading.Event, ahead: int) -> None:
        self._source, self._cancelled = source, cancelled
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._room = threading.Semaphore(ahead)
        self._news = asyncio.Event()
        self._told = False
        self._ended: asyncio.Future[None] = self._loop.create_future()

    async def items(self) -> AsyncGenerator[T, None]:
        threading.Thread(target=self._work, name="driver", daemon=True).start()
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                self._told = False
                while self._items:
                    yield self._items.popleft()
                    self._room.release()
                if self._ended.done() and not self._items:
                    break
        finally:
            self._cancelled.set()
            self._room.release()
            await _end_of(self._ended)
            self._ended.exception()  # seen, whether or not it is raised below
        self._ended.result()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                self._items.append(item)
                if not self._told:
                    self._told = True
                    self._loop.call_soon_threadsafe(self._news.set)
                self._room.acquire()
                if self._cancelled.is_set():
                    break
            if hasattr(self._source, "close"):
                self._source.close()
        except BaseException as raised:  # noqa: BLE001 (raised anew where the items are read)
            error = raised
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if error is None or self._cancelled.is_set():
            self._ended.set_result(None)
        elif isinstance(error, Exception):
            self._ended.set_exception(error)
        else:
            self._ended.set_exception(RuntimeError(f"the driver ended with {type(error).__name__}"))
        self._news.set()


async def _end_of(future: asyncio.Future[None]) -> None:
    """Wait for `future`, however often this task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as again:
            cancelled = again
    if cancelled is not None:
        raise cancelled
