"""Dynamic batching: texts that wait at the same time are worked on together, whosever they are.

Nobody is made to wait for company: a text that comes while nothing runs is worked on at once, and what
comes meanwhile is the next batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NARROW = 32  # tokens: texts up to this length share a batch; beyond it those within a factor of two


@dataclass(eq=False, slots=True)
class _Request:
    """The texts of one request.

    Attributes:
        waiting: by size class, the indexes of the texts that nobody works on yet, the longest last.
        rows: what came out, by index.
        missing: how many rows are to come.
    """

    texts: Sequence[Any]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    rows: list[Any]
    missing: int
    waiting: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    over: bool = False


Share = list[tuple[_Request, int]]  # texts of a batch, by request and index


class Batcher:
    """One thread that does everything that waits, batch by batch. Requests take turns in leading one.

    Args:
        work: from the tokens of some texts to an array of shape (texts, width).
        budget: tokens that a batch may have, padding included; one text may always be.
    """

    def __init__(self, work: Callable[[list[Any]], Any], budget: int) -> None:
        self._work, self._budget = work, budget
        self._requests: deque[_Request] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    async def rows(self, texts: Sequence[Any]) -> Any:
        """What `work` makes of `texts`, in their order. Cancelled, its texts are dropped.

        Args:
            texts: arrays of tokens.

        Raises:
            whatever `work` raises for these texts alone.
        """
        loop = asyncio.get_running_loop()
        request = _Request(texts, loop.create_future(), loop, [None] * len(texts), len(texts))
        for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
            request.waiting[_size_class(len(texts[index]))].append(index)
        with self._news:
            self._requests.append(request)
            self._news.notify()
        try:
            return await request.answer
        finally:
            request.over = True

    def close(self) -> None:
        """Work on nothing more; returns when the batch that runs is done."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._do(batch)

    def _next(self) -> Share:
        """The next batch, once there is one; empty when closed."""
        with self._news:
            while not self._closed:
                self._requests = deque(one for one in self._requests if one.waiting and not one.over)
                if self._requests:
                    batch = self._fill()
                    self._requests.rotate(-1)
                    return batch
                self._news.wait()
        return []

    def _fill(self) -> Share:
        """The longest texts of the request whose turn it is, and of the others what is about as long."""
        batch: Share = []
        size, width = max(self._requests[0].waiting), 0
        for request in self._requests:
            indexes = request.waiting.get(size, [])
            while indexes:
                wider = max(width, len(request.texts[indexes[-1]]))
                if batch and (len(batch) + 1) * wider > self._budget:
                    break
                width = wider
                batch.append((request, indexes.pop()))
            if not indexes:
                request.waiting.pop(size, None)
        return batch

    def _do(self, batch: Share) -> None:
        owners = list(dict.fromkeys(request for request, _ in batch))
        try:
            rows = self._work([request.texts[index] for request, index in batch])
        except Exception as error:  # noqa: BLE001 (raised anew where the request waits)
            if len(owners) == 1:
                _answer(owners[0], error)
                return
            for owner in owners:  # whose fault it is shows when each is alone
                self._do([(request, index) for request, index in batch if request is owner])
            return
        for (request, index), row in zip(batch, rows, strict=True):
            request.rows[index] = row
            request.missing -= 1
        for owner in owners:
            if not owner.missing:
                _answer(owner, None)


def _size_class(length: int) -> int:
    return max(NARROW, 1 << (length - 1).bit_length())


def _answer(request: _Request, error: Exception | None) -> None:
    """Tell the loop on which `request` waits, unless nobody does any more."""
    import numpy

    if request.over:
        return
    request.over = True
    rows = None if error else numpy.stack(request.rows)

    def tell() -> None:
        if request.answer.done():  # cancelled
            return
        if error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(rows)

    request.loop.call_soon_threadsafe(tell)
