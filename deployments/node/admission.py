"""Who works now and who waits: a runner's slots, and a bounded queue by priority before them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from blocks.errors import Busy, DeadlineExceeded, NotAdmitted
from tasks.protocol.inference_pb2 import HIGH, LOW, NORMAL

ORDER = (HIGH, NORMAL, LOW)


class Admission:
    """Call `enter`, or else `wait`; after either, `leave` in a `finally`. `changed` hears of it all."""

    def __init__(self, slots: int, queue: int, changed: Callable[[], None]) -> None:
        self.slots = slots
        self.active = 0
        self.closed = False
        self._queue = queue
        self._changed = changed
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {priority: deque() for priority in ORDER}
        self._last = time.monotonic()
        self._mean_s = 0.0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def idle_s(self) -> float:
        """Seconds since it last worked; 0 while it works."""
        return 0.0 if self.active else time.monotonic() - self._last

    def enter(self) -> bool:
        """Take a free slot at once, if there is one and nobody waits."""
        if self.closed:
            raise NotAdmitted("the model is being unloaded; try again", retry_after=1)
        if self.active >= self.slots:
            return False
        self.active += 1
        self._quiet.clear()
        self._changed()
        return True

    async def wait(self, priority: int, deadline_s: float) -> None:
        """Take a slot when one comes free: high priority first, then in order of arrival.

        Raises:
            Busy: the queue is full.
            DeadlineExceeded: no slot came free within `deadline_s` (0: no deadline).
        """
        if self.queued >= self._queue:
            raise Busy(
                f"all {self.slots} slots and all {self._queue} places in the queue are taken",
                retry_after=self._expected_wait_s(),
            )
        line = self._waiting.get(priority, self._waiting[NORMAL])
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._changed()
        try:
            await asyncio.wait([turn], timeout=deadline_s or None)
        except asyncio.CancelledError:
            if turn.done():
                self.leave()
            raise
        finally:
            if not turn.done():
                line.remove(turn)
                self._changed()
        if not turn.done():
            raise DeadlineExceeded(
                "no slot came free within the request's deadline", retry_after=self._expected_wait_s()
            )

    def leave(self, worked_s: float | None = None) -> None:
        """Give the slot to the next in line."""
        if worked_s is not None:
            self._mean_s = worked_s if not self._mean_s else 0.9 * self._mean_s + 0.1 * worked_s
        for priority in ORDER:
            if self._waiting[priority]:
                self._waiting[priority].popleft().set_result(None)
                break
        else:
            self.active -= 1
            self._last = time.monotonic()
            if not self.active:
                self._quiet.set()
        self._changed()

    def close_if_idle(self) -> bool:
        """Take nothing from now on, unless something is being worked on."""
        if self.active:
            return False
        self.closed = True
        return True

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing from now on; whether all that was taken has ended within the deadline."""
        self.closed = True
        try:
            await asyncio.wait_for(self._quiet.wait(), deadline_s)
        except TimeoutError:
            return False
        return True

    def _expected_wait_s(self) -> float:
        return max(1.0, round(self._mean_s * (self.queued + 1) / self.slots, 1))
