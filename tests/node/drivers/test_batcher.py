"""deployments/node/drivers/batcher.py: real threads, over work that can be watched and held up."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deployments.node.drivers.batcher import NARROW, Batcher

BUDGET = 256
POISON = 666


class Sums:
    """Work whose row for a text is its sum and its length. While `closed`, it waits before each batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Semaphore(0)
        self.batcher = Batcher(self.work, BUDGET)

    def work(self, texts: list[Any]) -> Any:
        self.batches.append(texts)
        self.begun.release()
        assert self.open.wait(10)
        if any(POISON in text for text in texts):
            raise ValueError("poison")
        return np.array([[text.sum(), len(text)] for text in texts], np.float32)

    async def held(self) -> asyncio.Task[Any]:
        """Let a text of its own occupy the thread, until `open` is set."""
        self.open.clear()
        task = asyncio.create_task(self.batcher.rows([text(1)]))
        assert await asyncio.to_thread(self.begun.acquire, timeout=5)
        return task


@pytest.fixture
def sums() -> Iterator[Sums]:
    work = Sums()
    yield work
    work.open.set()
    work.batcher.close()
    assert not work.batcher._thread.is_alive()


def text(length: int, value: int = 1) -> Any:
    return np.full(length, value, np.int32)


async def test_every_text_gets_its_own_row_however_many_ask_at_once(sums: Sums) -> None:
    chance = random.Random(1)

    async def ask() -> None:
        for _ in range(5):
            texts = [text(chance.randint(1, 300), chance.randint(1, 9)) for _ in range(chance.randint(1, 40))]
            rows = await sums.batcher.rows(texts)
            assert rows.tolist() == [[one.sum(), len(one)] for one in texts]

    await asyncio.gather(*(ask() for _ in range(16)))
    for batch in sums.batches:
        widest, shortest = len(max(batch, key=len)), len(min(batch, key=len))
        assert len(batch) == 1 or len(batch) * widest <= BUDGET
        assert widest <= max(NARROW, 2 * shortest)


async def test_what_waits_together_is_one_batch(sums: Sums) -> None:
    first = await sums.held()
    others = [asyncio.create_task(sums.batcher.rows([text(8, value)])) for value in range(20)]
    await asyncio.sleep(0)
    sums.open.set()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in sums.batches] == [1, 20]


async def test_a_small_request_does_not_wait_for_a_large_one(sums: Sums) -> None:
    first = await sums.held()
    large = asyncio.create_task(sums.batcher.rows([text(30)] * 200))
    await asyncio.sleep(0)
    small = asyncio.create_task(sums.batcher.rows([text(100)]))
    await asyncio.sleep(0)
    sums.open.set()
    await asyncio.gather(first, small, large)
    assert [len(batch[0]) for batch in sums.batches[:3]] == [1, 30, 100]


async def test_one_that_leaves_is_not_worked_on_and_the_others_are(sums: Sums) -> None:
    first = await sums.held()
    leaver = asyncio.create_task(sums.batcher.rows([text(20, 7)] * 500))
    stayer = asyncio.create_task(sums.batcher.rows([text(20, 3)]))
    await asyncio.sleep(0)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    sums.open.set()
    await first
    assert (await stayer).tolist() == [[60, 20]]
    assert not any(7 in one for batch in sums.batches for one in batch)


async def test_the_fault_of_one_is_nobody_elses(sums: Sums) -> None:
    first = await sums.held()
    bad = asyncio.create_task(sums.batcher.rows([text(5), text(5, POISON)]))
    good = [asyncio.create_task(sums.batcher.rows([text(5, value)])) for value in range(5)]
    await asyncio.sleep(0)
    sums.open.set()
    await first
    with pytest.raises(ValueError, match="poison"):
        await bad
    assert [rows.tolist() for rows in await asyncio.gather(*good)] == [[[5 * v, 5]] for v in range(5)]
    assert (await sums.batcher.rows([text(2)])).tolist() == [[2, 2]]
