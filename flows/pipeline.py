"""Pipeline: several flows as the steps of one job, each as soon as what it needs is there.

Each step's result is kept when it is done, so that another attempt of the job, after its machine was
lost, does only what is left. A failed step fails those that need it, and no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from prefect import Task, flow
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from blocks.catalogue import Catalogue
from blocks.errors import NotFound, SmiError, StepsFailed
from blocks.storage import Storage
from flows.definition import Pipeline
from flows.kinds import media_in
from flows.plan import Plan, Planned
from tasks.artifacts import show
from tasks.fleet import current_fleet
from tasks.job import JobRun, StepProgress, current_job, current_step, in_job
from tasks.step import step as declared

RETRY_S = [1.0, 4.0]  # before a step's second and third attempt: a node that died is known to be gone


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


class StepError(BaseModel):
    """Why a step has no result, in the API's codes."""

    code: str
    message: str
    param: str | None = None


class StepResult(BaseModel):
    """How a step ended. `result` is what its flow returned.

    Attributes:
        model, node: of the last request that it made.
        attempts: how often it was begun in the run that finished it.
        started: seconds since the epoch; `seconds`: how long it took, with all attempts.
    """

    task: str
    status: Literal["succeeded", "failed", "skipped"]
    model: str = ""
    node: str = ""
    attempts: int = 0
    started: float
    seconds: float = 0.0
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
    job = current_job() or JobRun(f"runs/{flow_run.id}", str(flow_run.name))  # in a flow of one's own
    done = await Run(request.plan, job, fleet.storage, fleet.catalogue).all()
    results = {name: done[name] for name in request.pipeline.steps}
    if failed := {name: end for name, end in results.items() if end.status == "failed"}:
        skipped = [name for name, end in results.items() if end.status == "skipped"]
        raise _failure(failed, skipped, len(results))
    return PipelineResult(name=request.pipeline.name, steps=results)


def _failure(failed: Mapping[str, StepResult], skipped: list[str], total: int) -> StepsFailed:
    codes = ", ".join(f"{name} ({done.error.code})" for name, done in failed.items() if done.error)
    left = f"; skipped, as they need it: {', '.join(skipped)}" if skipped else ""
    reasons = "; ".join(f"{name}: {done.error.message}" for name, done in failed.items() if done.error)
    return StepsFailed(f"{len(failed)} of {total} steps failed: {codes}{left}", detail=reasons)


def step_reference(folder: str, name: str) -> str:
    """Where the outcome of a job's step is kept."""
    return f"{folder}/steps/{name}.json"


class Run:
    """One run of a plan, within a flow run of Prefect's."""

    def __init__(self, plan: Plan, job: JobRun, storage: Storage, catalogue: Catalogue) -> None:
        self._plan, self._job, self._storage, self._catalogue = plan, job, storage, catalogue

    async def all(self) -> dict[str, StepResult]:
        """How each step ended."""
        under_way: dict[str, asyncio.Task[StepResult]] = {}
        try:
            async with asyncio.TaskGroup() as group:
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
        done = StepResult(task=step.asked.task, status="skipped", started=time.time(), error=error)
        self._note(step, "skipped", done)
        return done

    def _note(self, step: Planned, state: Literal["succeeded", "skipped"], done: StepResult) -> None:
        """A step that is not run now, in the job's progress."""
        progress = StepProgress(step.name, done.started, done.started + done.seconds, state)
        progress.fraction = 1.0 if state == "succeeded" else 0.0
        progress.message = done.error.message if done.error else ""
        progress.model, progress.node = done.model, done.node
        self._job.steps.append(progress)
        self._job.changed(self._job)

    async def _performed(self, step: Planned, results: Mapping[str, StepResult]) -> StepResult:
        """Run it as a task of Prefect's, of its own name and priority."""
        done = StepResult(task=step.asked.task, status="failed", started=time.time())

        async def perform(needed: Mapping[str, StepResult]) -> StepResult:
            done.attempts += 1
            progress = current_step()
            try:
                values = {name: other.result for name, other in needed.items()}
                request = self._plan.request(step, values, self._catalogue)
                done.result = await step.entry.flow.fn(request)
            finally:
                if progress is not None:
                    done.model, done.node = progress.model, progress.node
            done.status, done.seconds = "succeeded", time.time() - done.started
            await self._keep(step, done)
            await show(self._job, step.name, done.result)
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
                done.status, done.seconds = "failed", time.time() - done.started
                param = step.located(error.param) if error.param else None
                done.error = StepError(code=error.code, message=error.whole, param=param)
                done.result = None
                return done


_ENDED = {"failed": "failed", "skipped": "was skipped"}


async def _worth_another(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, SmiError) and state.data.retryable
