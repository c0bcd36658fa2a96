"""A job's run: a flow that Prefect's engine runs, with its progress and the files that it makes.

`current_job()` is the run that the code is in; None in a live run, and in a flow of somebody's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal, Self

from pydantic import BaseModel

from blocks.errors import SmiError
from blocks.storage import Media
from tasks.live import current
from tasks.principal import SYSTEM, Principal

Priority = Literal["high", "normal", "low"]
StepState = Literal["running", "succeeded", "failed", "cancelled", "skipped"]


class StepError(BaseModel):
    """Why a step failed, in the API's codes."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Of errors that are not ours only the type is told."""
        if isinstance(error, SmiError):
            return cls(code=error.code, message=error.whole, param=error.param)
        return cls(code=SmiError.code, message=type(error).__name__)


@dataclass(slots=True)
class StepProgress:
    """One step of a job. Times are seconds since the epoch; `fraction` 0 to 1, 0 while unknown.

    Attributes:
        stage: what it does now: "loading", "queued", "working"; "waiting" while nobody has room for it.
        model: what its last request asked for, and `node` where that was placed.
    """

    name: str
    started: float | None = None
    ended: float | None = None
    state: StepState = "running"
    fraction: float = 0.0
    stage: str = ""
    error: StepError | None = None
    model: str = ""
    node: str = ""


def _nobody(job: JobRun) -> None:
    """Nobody follows the progress."""


@dataclass(slots=True)
class JobRun:
    """What the steps of a job share.

    Attributes:
        folder: the reference below which its files lie, such as `jobs/job_1`.
        served: whether the API gives out its files, which it finds by the run's progress.
        changed: called after each change of `steps`; must return at once.
        kept: the files that its steps have made, by their names below `folder`/files; one without a
            `reference` is not stored yet.
        shown: results of steps that are on the run's page in Prefect already.
    """

    folder: str
    request_id: str = ""
    principal: Principal = SYSTEM
    priority: Priority = "normal"
    steps: list[StepProgress] = field(default_factory=list)
    changed: Callable[[JobRun], None] = _nobody
    kept: dict[str, Media] = field(default_factory=dict)
    shown: list[object] = field(default_factory=list)
    served: bool = True

    @classmethod
    def of_nobody(cls) -> Self:
        """In a flow of somebody's own, or in none: files of each call lie apart, and links find none."""
        from prefect.runtime import flow_run  # the command line imports this module, and does without

        folder = f"runs/{flow_run.id or 'script'}/{token_hex(8)}"
        return cls(folder, str(flow_run.name or "script"), served=False)


_job: ContextVar[JobRun | None] = ContextVar("smi_job", default=None)
_step: ContextVar[StepProgress | None] = ContextVar("smi_step", default=None)


def current_job() -> JobRun | None:
    return _job.get()


def current_step() -> StepProgress | None:
    """The outermost step of a job that the code is in."""
    return _step.get()


@contextmanager
def in_job(job: JobRun) -> Iterator[None]:
    """Within it, `job` is the current one."""
    token = _job.set(job)
    try:
        yield
    finally:
        _job.reset(token)


@contextmanager
def in_step(job: JobRun, name: str) -> Iterator[StepProgress]:
    """Within it, what is done counts for the step `name`, begun now. The caller says how it ended."""
    step = StepProgress(name, time.time())
    job.steps.append(step)
    token = _step.set(step)
    job.changed(job)
    try:
        yield step
    finally:
        _step.reset(token)
        step.ended = time.time()
        job.changed(job)


def progress(stage: str, fraction: float = 0.0) -> None:
    """Note how far the current step of a job is; nothing outside of one."""
    job, step = _job.get(), _step.get()
    if job is not None and step is not None:
        step.stage, step.fraction = stage, fraction
        job.changed(job)


def placed(model: str, node: str) -> None:
    """Note where the current step of a job works; nothing outside of one."""
    step = _step.get()
    if step is not None:
        step.model, step.node = model, node


def principal() -> Principal:
    """On whose behalf the code runs."""
    run, job = current(), _job.get()
    if run is not None:
        return run.principal
    return job.principal if job is not None else SYSTEM
