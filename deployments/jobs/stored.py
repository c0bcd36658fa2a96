"""Where a job's files are, and how a flow run names them.

Content never enters Prefect: a job's flow run has the parameters

    {"request": {"reference": "jobs/job_1/request.json", "attempt": 2, "priority": "low"}}

and the worker that runs it reads the request there and writes `jobs/job_1/2/result.json` or
`jobs/job_1/2/error.json` before Prefect hears how the run ended, and `progress.json` beside them meanwhile.
A run that Prefect's UI or a schedule started has no job; what it makes lies below `runs/<its id>`.
"""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocks.errors import SmiError, from_code
from tasks.job import JobRun, Priority, StepError, StepState
from tasks.principal import Principal

NOT_SHARED = "StorageNotShared"  # name of the state of a run whose worker did not find its request


class Outcome(ABC):
    """Where a run leaves what it has to say.

    Attributes:
        folder: the reference below which all that is the job's, or the run's, lies.
        own: the same of this attempt alone.
    """

    @property
    @abstractmethod
    def folder(self) -> str: ...

    @property
    def own(self) -> str:
        return self.folder

    @property
    def result(self) -> str:
        return posixpath.join(self.own, "result.json")

    @property
    def error(self) -> str:
        return posixpath.join(self.own, "error.json")

    @property
    def progress(self) -> str:
        return posixpath.join(self.own, "progress.json")


class OfNoJob(Outcome):
    """A flow run that Prefect's UI or a schedule started."""

    def __init__(self, flow_run_id: str) -> None:
        self.flow_run_id = flow_run_id

    @property
    def folder(self) -> str:
        return f"runs/{self.flow_run_id}"


class Stored(BaseModel, Outcome):
    """A request by reference; it stands where the flow's own request would."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str = Field(pattern=r"^jobs/[A-Za-z0-9_-]+/request\.json$")
    attempt: int = Field(1, ge=1)
    priority: Priority = "normal"

    @classmethod
    def of(cls, job_id: str, attempt: int = 1, priority: Priority = "normal") -> Stored:
        return cls(reference=f"jobs/{job_id}/request.json", attempt=attempt, priority=priority)

    @classmethod
    def found_in(cls, request: Any) -> Stored | None:
        """The reference that a run's parameter `request` is, or None if it is a request itself."""
        try:
            return cls.model_validate(request)
        except ValidationError:
            return None

    @property
    def folder(self) -> str:
        return posixpath.dirname(self.reference)

    @property
    def own(self) -> str:
        return posixpath.join(self.folder, str(self.attempt))


class StoredRequest(BaseModel):
    """What a job's `request.json` holds: its flow's request, and on whose behalf it runs."""

    model_config = ConfigDict(extra="forbid")

    principal: Principal
    request_id: str
    request: dict[str, Any]


class StepShown(BaseModel):
    """A step of a run. Times are seconds since the epoch; `progress` is 0 to 1, and 0 while unknown.

    Attributes:
        stage: what it does now: "loading", "queued", "working"; "waiting" while nobody has room for it.
        model: what its last request asked for, and `node` where that was placed.
        error: why it failed.
    """

    name: str
    status: StepState
    progress: float
    stage: str
    model: str
    node: str
    started_at: float | None
    ended_at: float | None
    error: StepError | None


class FileKept(BaseModel):
    """A file that a run made."""

    name: str
    content_type: str
    bytes: int


class Progress(BaseModel):
    """What a run's `progress.json` holds."""

    steps: list[StepShown] = []
    files: list[FileKept] = []

    @classmethod
    def of(cls, run: JobRun) -> Progress:
        steps = [
            StepShown(
                name=step.name,
                status=step.state,
                progress=step.fraction,
                stage=step.stage,
                model=step.model,
                node=step.node,
                started_at=step.started,
                ended_at=step.ended,
                error=step.error,
            )
            for step in run.steps
        ]
        files = [
            FileKept(name=name, content_type=media.content_type, bytes=media.size or 0)
            for name, media in run.kept.items()
            if media.reference is not None
        ]
        return cls(steps=steps, files=files)

    def file(self, name: str) -> FileKept | None:
        return next((file for file in self.files if file.name == name), None)


class Failure(BaseModel):
    """What is stored of an error, and what a client is told of it."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @classmethod
    def of(cls, error: SmiError) -> Failure:
        return cls(code=error.code, message=error.whole, param=error.param, retryable=error.retryable)

    def exception(self) -> SmiError:
        return from_code(self.code, self.message, param=self.param)
