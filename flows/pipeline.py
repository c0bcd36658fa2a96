"""Pipeline: several flows as the steps of one job, each as soon as what it needs is there.

Each step's result is kept when it is done, so that another attempt of the job, after its machine was
lost, does only what is left. A failed step fails those that need it, and no other. A step for which nobody
has room waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from prefect import Task, flow, get_run_logger
from prefect.client.schemas.objects import State, TaskRun
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from blocks.errors import NotFound, OutOfMemory, SmiError, StepsFailed, Unavailable, from_code
from blocks.storage import Storage
from flows.definition import Pipeline
from flows.kinds import media_in
from flows.plan import Plan, Planned
from tasks.artifacts import show
from tasks.fleet import current_fleet
from tasks.job import JobRun, StepError, StepProgress, current_job, current_step, in_job, progress
from tasks.step import step as declared

RETRY_S = [1.0, 4.0]  # before a step's second and third attempt: a node that died is known to be gone
WAIT_S = 300.0  # how long a step waits for room, whatever its priority
PAUSES_S = (1.0, 10.0)  # the first pause and the longest, unless whoever has no room names one


class PipelineRequest(BaseModel):
    """A pipeline and its inputs: values, and files. One that cannot be run is refused as `Plan` says."""

    model_config = ConfigDict(extra="forbid")

    pipeline: Pipeline
    inputs: dict[str, Any] = Field(default_factory=dict)
    _plan: Plan = PrivateAttr()

    @model_validator(mode="after")
    def _planned(self) -> Self:
        from flows.registry import STEPS  # which lists this flow as well

        self._plan = Plan(self.pipeline, self.inputs, STEPS)
        self.inputs = self._plan.inputs
        return self

    @property
    def plan(self) -> Plan:
        return self._plan


class StepResult(BaseModel):
    """How a step ended. `result` is what its flow returned.

    Attributes:
        model, node: of the last request that it made.
        attempts: how often it was begun in the run that finished it, but for room.
        started_at, ended_at: seconds since the epoch, over all attempts.
    """

    task: str
    status: Literal["succeeded", "failed", "skipped"]
    model: str = ""
    node: str = ""
    attempts: int = 0
    started_at: float
    ended_at: float
    result: Any = None
    error: StepError | None = None


class PipelineResult(BaseModel):
    """What each step returned."""

    name: str
    steps: dict[str, StepResult]


@flow(name="pipeline")
async def pipeline(request: PipelineRequest) -> PipelineResult:
    fleet = await current_fleet()
    request.plan.models(fleet.catalogue)
    job = current_job() or JobRun.of_nobody()
    done = await Run(request.plan, job, fleet.storage).all()
    results = {name: done[name] for name in request.pipeline.steps}
    if failed := {name: end for name, end in results.items() if end.status == "failed"}:
        skipped = [name for name, end in results.items() if end.status == "skipped"]
        raise _failure(failed, skipped, len(results))
    return PipelineResult(name=request.pipeline.name, steps=results)


def _failure(failed: Mapping[str, StepResult], skipped: list[str], total: int) -> StepsFailed:
    codes = ", ".join(f"{name} ({done.error.code})" for name, done in failed.items() if done.error)
    left = f"; skipped, as they need it: {', '.join(skipped)}" if skipped else ""
    reasons = "; ".join(f"{name}: {done.error.message}" for name, done in failed.items() if done.error)
    retryable = all(from_code(done.error.code, "").retryable for done in failed.values() if done.error)
    told = f"{len(failed)} of {total} steps failed: {codes}{left}"
    return StepsFailed(told, detail=reasons, retryable=retryable)


def step_reference(folder: str, name: str) -> str:
    """Where the outcome of a job's step is kept."""
    return f"{folder}/steps/{name}.json"


class Run:
    """One run of a plan, within a flow run of Prefect's."""

    def __init__(self, plan: Plan, job: JobRun, storage: Storage) -> None:
        self._plan, self._job, self._storage = plan, job, storage
        self._group: asyncio.TaskGroup

    async def all(self) -> dict[str, StepResult]:
        """How each step ended."""
        under_way: dict[str, asyncio.Task[StepResult]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for name, step in self._plan.steps.items():
                    needed = {other: under_way[other] for other in step.needs}
                    under_way[name] = group.create_task(self._when_ready(step, needed))
        except BaseExceptionGroup as several:  # not of steps: they fail with a result
            raise several.exceptions[0] from None
        return {name: task.result() for name, task in under_way.items()}

    async def _when_ready(self, step: Planned, needed: Mapping[str, asyncio.Task[StepResult]]) -> StepResult:
        results = {name: await task for name, task in needed.items()}
        kept = await self._kept(step)
        if kept is not None:
            return kept
        missing = {name: done.status for name, done in results.items() if done.status != "succeeded"}
        done = self._skipped(step, missing) if missing else await self._performed(step, results)
        if done.status != "succeeded":
            await self._keep(step, done)
        return done

    async def _kept(self, step: Planned) -> StepResult | None:
        """Its outcome, if an earlier attempt of the job has finished it."""
        try:
            text = await asyncio.to_thread(self._storage.read, step_reference(self._job.folder, step.name))
        except NotFound:
            return None
        done = StepResult.model_validate_json(text)
        if done.status != "succeeded":
            return None
        done.result = step.entry.result.model_validate(done.result)
        for _, media in media_in(done.result):
            self._job.kept[media.name] = media
        self._note(step, "succeeded", done)
        return done

    async def _keep(self, step: Planned, done: StepResult) -> None:
        reference = step_reference(self._job.folder, step.name)
        await asyncio.to_thread(self._storage.write, reference, done.model_dump_json().encode())

    def _skipped(self, step: Planned, missing: Mapping[str, str]) -> StepResult:
        reasons = ", ".join(f"step {name!r} {_ENDED[status]}" for name, status in missing.items())
        error = StepError(code="step_skipped", message=f"not begun: {reasons}")
        now = time.time()
        done = StepResult(task=step.asked.task, status="skipped", started_at=now, ended_at=now, error=error)
        self._note(step, "skipped", done)
        return done

    def _note(self, step: Planned, state: Literal["succeeded", "skipped"], done: StepResult) -> None:
        """A step that is not run now, in the job's progress."""
        noted = StepProgress(step.name, done.started_at, done.ended_at, state, error=done.error)
        noted.fraction = 1.0 if state == "succeeded" else 0.0
        noted.model, noted.node = done.model, done.node
        self._job.steps.append(noted)
        self._job.changed(self._job)

    async def _performed(self, step: Planned, results: Mapping[str, StepResult]) -> StepResult:
        """Run it as a task of Prefect's, of its own name and priority."""
        now = time.time()
        done = StepResult(task=step.asked.task, status="failed", started_at=now, ended_at=now)

        async def perform(needed: Mapping[str, StepResult]) -> StepResult:
            done.attempts += 1
            noted = current_step()
            try:
                values = {name: other.result for name, other in needed.items()}
                request = self._plan.request(step, values)
                done.result = await _with_room(partial(step.entry.flow.fn, request))
            except SmiError as error:
                error.param = step.located(error.param) if error.param else None
                raise
            finally:
                done.ended_at = time.time()
                if noted is not None:
                    done.model, done.node = noted.model, noted.node
            done.status = "succeeded"
            await self._keep(step, done)
            self._group.create_task(show(self._job, step.name, done.result))  # others need not wait for it
            return done

        task = declared(
            perform,
            name=step.name,
            task_run_name=step.name,
            retries=len(RETRY_S),
            retry_delay_seconds=RETRY_S,
            retry_condition_fn=_worth_another,
        )
        with in_job(replace(self._job, priority=step.asked.priority or self._job.priority)):
            try:
                return await task(results)
            except SmiError as error:
                done.status, done.ended_at, done.result = "failed", time.time(), None
                done.error = StepError.of(error)
                return done


_ENDED = {"failed": "failed", "skipped": "was skipped"}


async def _with_room(perform: Callable[[], Awaitable[Any]]) -> Any:
    """What `perform` returns, once somebody has room for it."""
    give_up, pause = time.monotonic() + WAIT_S, PAUSES_S[0]
    while True:
        try:
            return await perform()
        except Unavailable as error:
            left = give_up - time.monotonic()
            if left <= 0 or not _may_find_room(error):
                raise
            get_run_logger().info("waiting: %s: %s", error.code, error.message)
            progress("waiting")
            await asyncio.sleep(min(error.retry_after or pause, left))
            pause = min(2 * pause, PAUSES_S[1])
        progress("")


def _may_find_room(error: SmiError) -> bool:
    return isinstance(error, Unavailable) and not isinstance(error, OutOfMemory)


async def _worth_another(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.data
    return isinstance(error, SmiError) and error.retryable and not _may_find_room(error)
