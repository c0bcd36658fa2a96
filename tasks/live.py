"""A live run: a flow whose client waits, run at once in this process and recorded beside the answer.

`current()` is the run that the code is in, or None in a run of Prefect's own engine. Steps add
themselves to it (`tasks/step.py`), and `emit` streams deltas to whoever waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.principal import SYSTEM, Principal

Label = str | int | float | bool
Sink = Callable[[Any], Awaitable[None]]
EndState = Literal["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]


@dataclass(slots=True)
class StepRecord:
    """One step of a run. Times are seconds since the epoch."""

    name: str
    started: float
    ended: float = 0.0
    state: EndState = "COMPLETED"
    message: str = ""


@dataclass(slots=True)
class LiveRun:
    """What is recorded of a live run: names, times, numbers; never content."""

    flow: str
    request_id: str
    started: float = field(default_factory=time.time)
    sink: Sink | None = None
    steps: list[StepRecord] = field(default_factory=list)
    labels: dict[str, Label] = field(default_factory=dict)
    ended: float = 0.0
    state: EndState = "COMPLETED"
    message: str = ""
    principal: Principal = SYSTEM


_current: ContextVar[LiveRun | None] = ContextVar("smi_live_run", default=None)


def current() -> LiveRun | None:
    return _current.get()


@contextmanager
def entered(run: LiveRun) -> Iterator[None]:
    """Within it, `run` is the current run."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


async def emit(delta: Any) -> None:
    """Hand a delta to the client that waits, if one does. Waits while that client is slow."""
    run = _current.get()
    if run is not None and run.sink is not None:
        await run.sink(delta)


def label(**labels: Label) -> None:
    """Note model, tier, usage and the like on the live run."""
    run = _current.get()
    if run is not None:
        run.labels.update(labels)
