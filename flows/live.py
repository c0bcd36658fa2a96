"""Run a flow's body at once, for a client that waits, and have the run recorded beside the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

from prefect import Flow

from tasks.live import LiveRun, entered
from tasks.step import told

P = ParamSpec("P")
R = TypeVar("R")


class Recorder(Protocol):
    """Takes note of runs without making them wait: both calls return at once and never raise."""

    def started(self, run: LiveRun) -> None: ...

    def ended(self, run: LiveRun) -> None: ...


async def run_live(
    flow: Flow[P, Coroutine[Any, Any, R]],
    run: LiveRun,
    recorder: Recorder,
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Run `flow`'s body in this task; its steps and deltas go to `run`, its start and end to `recorder`.

    Raises:
        whatever the flow raises, recorded as failed; cancellation is recorded as cancelled.
    """
    recorder.started(run)
    with entered(run):
        try:
            return await flow.fn(*args, **kwargs)
        except asyncio.CancelledError:
            run.state, run.message = "CANCELLED", "the client left"
            raise
        except BaseException as error:
            run.state, run.message = "FAILED", told(error)
            raise
        finally:
            run.ended = time.time()
            recorder.ended(run)
