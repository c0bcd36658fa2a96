"""Dynamic batching: texts that wait at the same time are worked on together, whosever they are.

Nobody is made to wait for company: a text that comes while nothing runs is worked on at once, and what
comes meanwhile is the next batch.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

NARROW = 32  # tokens: texts up to this length share a batch; beyond it those within a factor of two


@dataclass(eq=False, slots=True)
class _Text:
    """One text of a request, at `index`. `taken`: it is in a batch, or was."""

    request: _Request
    index: int
    tokens: Any
    taken: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(eq=False, slots=True)
class _Request:
    """The texts of one request.

    Attributes:
        texts: those that may not be taken yet, the longest last.
        rows: what came out, by index.
        missing: how many rows are to come.
        over: nobody waits for it any more.
    """

    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    rows: list[Any]
    missing: int
    texts: list[_Text] = field(default_factory=list)
    over: bool = False

    def longest(self) -> _Text | None:
        """Of its texts that wait."""
        while self.texts and self.texts[-1].taken:
            self.texts.pop()
        return self.texts[-1] if self.texts else None


LENGTH = attrgetter("length")


class Batcher:
    """One thread that does everything that waits, batch by batch. Requests take turns in leading one.

    Args:
        work: from the tokens of some texts to an array of shape (texts, width).
        budget: tokens that a batch may have, padding included; one text may always be.
    """

    def __init__(self, work: Callable[[list[Any]], Any], budget: int) -> None:
        self._work, self._budget = work, budget
        self._requests: deque[_Request] = deque()
        self._waiting: list[_Text] = []  # of all requests, the longest last; only the thread's
        self._arrived: list[_Request] = []
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
        request = _Request(loop.create_future(), loop, [None] * len(texts), len(texts))
        request.texts = sorted((_Text(request, *text) for text in enumerate(texts)), key=LENGTH)
        with self._news:
            self._arrived.append(request)
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

    def _next(self) -> list[_Text]:
        """The next batch, once there is one; empty when closed."""
        while self._take_in():
            lead = self._requests[0]
            if (anchor := None if lead.over else lead.longest()) is not None:
                self._requests.rotate(-1)
                return self._around(anchor)
            self._requests.popleft()
            if lead.texts:
                self._waiting = [text for text in self._waiting if not text.request.over]
        return []

    def _take_in(self) -> bool:
        """Take in what has arrived, and wait for it when there is nothing to do; whether to go on."""
        with self._news:
            while not (self._closed or self._arrived or self._requests):
                self._news.wait()
            arrived, self._arrived = self._arrived, []
        if arrived:
            self._requests.extend(arrived)
            self._waiting.extend(text for request in arrived for text in request.texts)
            self._waiting.sort(key=LENGTH)
        return not self._closed

    def _around(self, anchor: _Text) -> list[_Text]:
        """A batch with `anchor`, and what is about as long: shorter texts first, then longer ones."""
        waiting, width = self._waiting, anchor.length
        low = waiting.index(anchor, bisect_left(waiting, width, key=LENGTH))
        high = low + 1

        def fits(longest: int, shortest: int) -> bool:
            alike = longest <= max(NARROW, 2 * shortest)
            return alike and (high - low + 1) * longest <= self._budget

        while low > 0 and fits(width, waiting[low - 1].length):
            low -= 1
        while high < len(waiting) and fits(waiting[high].length, waiting[low].length):
            high += 1
        batch = waiting[low:high]
        del waiting[low:high]
        for text in batch:
            text.taken = True
        return [text for text in batch if text is anchor or not text.request.over]

    def _do(self, batch: list[_Text]) -> None:
        owners = list(dict.fromkeys(text.request for text in batch))
        try:
            rows = self._work([text.tokens for text in batch])
        except Exception as error:  # noqa: BLE001 (raised anew where the request waits)
            if len(owners) == 1:
                _answer(owners[0], error)
                return
            for owner in owners:  # whose fault it is shows when each is alone
                self._do([text for text in batch if text.request is owner])
            return
        for text, row in zip(batch, rows, strict=True):
            text.request.rows[text.index] = row
            text.request.missing -= 1
        for owner in owners:
            if not owner.missing:
                _answer(owner, None)


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
