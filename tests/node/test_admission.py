"""deployments/node/admission.py"""

from __future__ import annotations

import asyncio

import pytest

from blocks.errors import Busy, DeadlineExceeded, NotAdmitted
from deployments.node.admission import Admission
from tasks.protocol.inference_pb2 import HIGH, LOW, NORMAL


def admission(slots: int = 1, queue: int = 8) -> Admission:
    return Admission(slots, queue, lambda: None)


async def test_order_is_by_priority_then_by_arrival() -> None:
    gate, order = admission(), list[str]()
    assert gate.enter()

    async def go(label: str, priority: int) -> None:
        await gate.wait(priority, 0)
        order.append(label)
        gate.leave()

    labels = [("l1", LOW), ("n1", NORMAL), ("l2", LOW), ("h1", HIGH), ("n2", NORMAL), ("h2", HIGH)]
    tasks = []
    for label, priority in labels:
        tasks.append(asyncio.create_task(go(label, priority)))
        await asyncio.sleep(0)
    gate.leave()
    await asyncio.gather(*tasks)
    assert order == ["h1", "h2", "n1", "n2", "l1", "l2"]
    assert (gate.active, gate.queued) == (0, 0)


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    gate = admission()
    gate.enter()
    waiting = asyncio.create_task(gate.wait(LOW, 0))
    await asyncio.sleep(0)
    gate.leave()  # the slot is the waiter's, though it has not run yet
    assert not gate.enter()
    await waiting


async def test_a_waiter_cancelled_as_its_turn_comes_passes_the_slot_on() -> None:
    gate = admission()
    gate.enter()
    first = asyncio.create_task(gate.wait(NORMAL, 0))
    second = asyncio.create_task(gate.wait(NORMAL, 0))
    await asyncio.sleep(0)
    gate.leave()
    first.cancel()
    await asyncio.wait([first])
    await asyncio.wait_for(second, 1)
    gate.leave()
    assert (gate.active, gate.queued) == (0, 0)


async def test_full_queue_is_busy_and_a_deadline_ends_the_wait() -> None:
    gate = admission(queue=1)
    gate.enter()
    waiting = asyncio.create_task(gate.wait(NORMAL, 0.05))
    await asyncio.sleep(0)
    with pytest.raises(Busy) as busy:
        await gate.wait(HIGH, 0)
    assert busy.value.retry_after == 1
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert gate.queued == 0


async def test_closed_only_if_idle_and_then_for_good() -> None:
    gate = admission()
    gate.enter()
    assert not gate.close_if_idle()
    gate.leave()
    assert gate.close_if_idle()
    with pytest.raises(NotAdmitted):
        gate.enter()


async def test_drain_waits_for_those_who_work_and_those_who_wait() -> None:
    gate = admission()
    gate.enter()
    waiting = asyncio.create_task(gate.wait(NORMAL, 0))
    await asyncio.sleep(0)
    assert not await gate.drain(0.02)
    draining = asyncio.create_task(gate.drain(1))
    gate.leave()
    await waiting
    assert not draining.done()
    gate.leave()
    assert await draining


async def test_idle_time_counts_from_the_last_work() -> None:
    gate = admission()
    gate.enter()
    assert gate.idle_s == 0
    gate.leave()
    await asyncio.sleep(0.02)
    assert gate.idle_s >= 0.02
