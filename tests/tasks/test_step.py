"""A step notes itself in a live run and is an ordinary task elsewhere."""

import asyncio

import pytest
from prefect import Task, flow

from blocks.errors import Busy, SmiError
from flows.live import run_live
from tasks.live import LiveRun, current, emit, label
from tasks.step import step


@step
async def double(number: int) -> int:
    label(doubled=number)
    await emit(number * 2)
    return number * 2


@step
async def fail(text: str) -> None:
    raise Busy("every slot is taken") if text == "busy" else ValueError(f"content: {text}")


@flow
async def work(number: int, *, fails: str = "") -> int:
    first, second = await asyncio.gather(double(number), double(number + 1))
    if fails:
        await fail(fails)
    return first + second


class Notes:
    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, run: LiveRun) -> None:
        self.events.append(f"started {run.flow}")

    def ended(self, run: LiveRun) -> None:
        self.events.append(f"ended {run.state}")


async def test_a_live_run_records_steps_deltas_and_labels() -> None:
    deltas: list[int] = []

    async def sink(delta: int) -> None:
        deltas.append(delta)

    run, notes = LiveRun("work", "req_1", sink=sink), Notes()
    assert await run_live(work, run, notes, 3) == 14
    assert notes.events == ["started work", "ended COMPLETED"]
    assert [record.name for record in run.steps] == ["double", "double"]
    assert all(run.started <= record.started <= record.ended <= run.ended for record in run.steps)
    assert sorted(deltas) == [6, 8]
    assert run.labels["doubled"] in (3, 4)
    assert current() is None


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [("busy", Busy, "overloaded: every slot is taken"), ("x", ValueError, "ValueError")],
)
async def test_a_failure_is_recorded_without_content(text: str, kind: type[Exception], told: str) -> None:
    run, notes = LiveRun("work", "req_1"), Notes()
    with pytest.raises(kind):
        await run_live(work, run, notes, 3, fails=text)
    assert notes.events[-1] == "ended FAILED"
    assert (run.message, run.steps[-1].state, run.steps[-1].message) == (told, "FAILED", told)


async def test_a_client_that_leaves_is_recorded_as_cancelled() -> None:
    started = asyncio.Event()

    @step
    async def hang() -> None:
        started.set()
        await asyncio.sleep(60)

    @flow
    async def hanging() -> None:
        await hang()

    run, notes = LiveRun("hanging", "req_1"), Notes()
    task = asyncio.create_task(run_live(hanging, run, notes))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (run.state, run.steps[0].state) == ("CANCELLED", "CANCELLED")


def test_a_step_is_a_prefect_task() -> None:
    assert isinstance(double, Task)
    assert double.persist_result is False


async def test_what_prefect_sees_of_an_error_holds_no_content() -> None:
    with pytest.raises(SmiError, match="unexpected ValueError") as caught:
        await fail.fn("a prompt")
    assert "a prompt" not in str(caught.value)
    assert caught.value.__suppress_context__
    with pytest.raises(Busy, match="every slot is taken"):
        await fail.fn("busy")
