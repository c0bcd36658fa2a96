"""deployments/node/bridge.py on real threads and a real loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from deployments.node.bridge import AHEAD, driving


async def read_into(got: list[int], start: Callable[[threading.Event], Iterator[int]]) -> None:
    async with driving(start) as items:
        async for item in items:
            got.append(item)


async def test_thread_items_arrive_in_order_and_errors_pass() -> None:
    def count(cancelled: threading.Event) -> Iterator[int]:
        yield from range(1000)
        raise ValueError("the end")

    got: list[int] = []
    with pytest.raises(ValueError, match="the end"):
        await read_into(got, count)
    assert got == list(range(1000))


async def test_error_before_the_first_item_passes() -> None:
    def fail(cancelled: threading.Event) -> Iterator[int]:
        raise ValueError("at once")
        yield 1

    with pytest.raises(ValueError, match="at once"):
        await read_into([], fail)


async def test_cancel_signals_the_thread_and_waits_for_its_real_end() -> None:
    signalled: list[float] = []
    over: list[float] = []

    def stubborn(cancelled: threading.Event) -> Iterator[int]:
        yield 1
        cancelled.wait()
        signalled.append(time.monotonic())
        time.sleep(0.3)
        over.append(time.monotonic())

    task = asyncio.create_task(read_into([], stubborn))
    await asyncio.sleep(0.05)
    left = time.monotonic()
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()  # a second one must not free the slot early either
    with pytest.raises(asyncio.CancelledError):
        await task
    assert signalled[0] - left < 0.1
    assert over
    assert time.monotonic() >= over[0]


async def test_leaving_early_closes_the_generator() -> None:
    closed = threading.Event()

    def endless(cancelled: threading.Event) -> Iterator[int]:
        try:
            while not cancelled.is_set():
                yield 1
        finally:
            closed.set()

    async with driving(endless) as items:
        async for _ in items:
            break
    assert closed.is_set()


async def test_a_slow_reader_holds_the_driver_back() -> None:
    made = 0

    def count(cancelled: threading.Event) -> Iterator[int]:
        nonlocal made
        while made < 10 * AHEAD:
            made += 1
            yield made

    async with driving(count) as items:
        async for _ in items:
            await asyncio.sleep(0.1)
            break
    assert made <= AHEAD + 2


async def test_async_generator_is_closed_with_the_event_set_only_on_cancel() -> None:
    seen: list[bool] = []

    async def endless(cancelled: threading.Event) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        except GeneratorExit:
            seen.append(cancelled.is_set())
            raise

    async with driving(endless) as items:
        async for _ in items:
            break

    async def read() -> None:
        async with driving(endless) as items:
            async for _ in items:
                await asyncio.sleep(10)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [False, True]
