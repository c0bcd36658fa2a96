"""/v1/jobs: requests that run in the background and outlive their client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import Cancelled, Conflict, InvalidRequest, NotFound, RunLost
from blocks.storage import Media
from blocks.validation import shortened
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.api.files import file_response, progress_of
from deployments.api.forms import file_of, form_of, is_form, parts
from deployments.api.intake import accept, input_reference
from deployments.jobs.requests import parsed
from deployments.jobs.store import Job, Jobs, JobState, new_job_id
from deployments.jobs.stored import Failure, FileKept, Progress, StepShown, Stored
from flows.entry import Entry
from flows.registry import flow_named
from tasks.fleet import current_fleet
from tasks.job import Priority, StepError, StepState
from tasks.links import link

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def _formed(job_id: str) -> str:
    if re.fullmatch("job_[0-9a-f]{24}", job_id) is None:
        raise NotFound("there is no such job: an id is 'job_' and 24 hexadecimal digits")
    return job_id


JobId = Annotated[str, AfterValidator(_formed)]


class JobRequest(BaseModel):
    """A flow's name and its parameters. A file comes in a form: fields `flow`, `priority` and `file`, and
    the parameters as fields of their own or as one field `parameters` of JSON."""

    model_config = ConfigDict(extra="forbid")

    flow: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    priority: Priority = "normal"


class JobObject(BaseModel):
    """A job. Times are seconds since the epoch; `error` is that of the last attempt."""

    id: str
    object: str = "job"
    flow: str
    model: str
    status: JobState
    priority: Priority
    attempt: int
    max_attempts: int
    cancelling: bool
    request_id: str
    flow_run_id: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    error: Failure | None

    @classmethod
    def of(cls, job: Job, **more: Any) -> Self:
        return cls(
            id=job.id,
            flow=job.flow,
            model=job.model,
            status=job.state,
            priority=job.priority,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            cancelling=job.cancelling and job.state == "running",
            request_id=job.request_id,
            flow_run_id=job.flow_run_id,
            created_at=job.created.timestamp(),
            started_at=_seconds(job.started),
            ended_at=_seconds(job.ended),
            error=Failure.model_validate(job.error) if job.error else None,
            **more,
        )


class JobFile(FileKept):
    """A file that the job made; `url` opens without a key until it expires."""

    url: str


class JobDetails(JobObject):
    """A job, how far its steps are and what files they have made."""

    steps: list[StepShown]
    files: list[JobFile]


class JobList(BaseModel):
    object: str = "list"
    data: list[JobObject]


def _seconds(time: datetime | None) -> float | None:
    return time.timestamp() if time else None


@router.post(
    "",
    status_code=202,
    summary="Hand in a job: JSON, or a form with a file",
    openapi_extra=takes_json(JobRequest),
)
async def submit_job(request: Request) -> JobObject:
    """With the header `Idempotency-Key`, handing in the same job again gives the job of the first time."""
    async with _handed_in(request) as (asked, upload):
        entry, job_id = flow_named(asked.flow), new_job_id()
        values = _with_file(entry, asked, upload, job_id)
        content = await asyncio.to_thread(parsed, entry.request, values, not is_form(request))
        files = {} if upload is None else {"file": upload}
        asked_for = asked.model_dump()
        return JobObject.of(
            await accept(request, entry, job_id, content, files, asked=asked_for, priority=asked.priority)
        )


@router.get("", summary="Your jobs, newest first")
async def list_jobs(request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> JobList:
    jobs = await _jobs(request).list(request.state.key.id, limit)
    return JobList(data=[JobObject.of(job) for job in jobs])


@router.get("/{job_id}", summary="One job")
async def get_job(request: Request, job_id: JobId) -> JobDetails:
    job = await _jobs(request).get(job_id, request.state.key.id)
    storage = (await current_fleet()).storage
    begun = job.state != "accepted" and job.attempt > 0
    progress = await progress_of(storage, Stored.of(job.id, job.attempt)) if begun else Progress()
    settings = request.app.state.settings
    files = [
        JobFile(**dict(file), url=link(settings, f"/v1/jobs/{job.id}/files/{file.name}"))
        for file in progress.files
    ]
    return JobDetails.of(job, steps=[_settled(step, job) for step in progress.steps], files=files)


def _settled(step: StepShown, job: Job) -> StepShown:
    """A step that was cut short, by the end of its worker say, does not run for ever."""
    if step.status != "running" or job.state == "running":
        return step
    end: StepState = "cancelled" if job.state == "cancelled" else "failed"
    code = Cancelled.code if job.state == "cancelled" else RunLost.code
    cut = StepError(code=code, message="the run ended before the step")
    return step.model_copy(update={"status": end, "error": step.error or cut})


@router.get("/{job_id}/files/{name:path}", summary="A file that the job made", response_model=None)
async def get_file(request: Request, job_id: JobId, name: str) -> Response:
    """The file itself, or the bytes that the header Range asks for. With `expires` and `signature`, as links
    have them, no key is needed."""
    jobs, key = _jobs(request), request.state.key
    job = await (jobs.signed_for(job_id) if key is None else jobs.get(job_id, key.id))
    return await file_response(
        request, (await current_fleet()).storage, Stored.of(job.id, max(1, job.attempt)), name
    )


@router.get("/{job_id}/result", summary="What the job's flow returned", response_model=None)
async def get_result(request: Request, job_id: JobId) -> Response:
    """The result as JSON; 409 while there is none; the job's own error if it failed."""
    job = await _jobs(request).get(job_id, request.state.key.id)
    if job.state == "failed" and job.error:
        raise Failure.model_validate(job.error).exception()
    if job.state == "cancelled":
        raise Conflict(f"job {job_id} was cancelled; it has no result")
    if job.state != "succeeded":
        raise Conflict(f"job {job_id} is {job.state}; ask again when its status is succeeded", retry_after=1)
    storage = (await current_fleet()).storage
    stored = await asyncio.to_thread(storage.read_shared, Stored.of(job.id, job.attempt).result)
    return Response(stored, media_type="application/json")


@router.post("/{job_id}/cancel", summary="Cancel a job", status_code=202)
async def cancel_job(request: Request, job_id: JobId) -> JobObject:
    """A job that waits is cancelled at once, one that runs soon after; one that is over is a conflict."""
    job = await _jobs(request).cancel(job_id, request.state.key.id)
    if job.state in ("succeeded", "failed"):
        raise Conflict(f"job {job_id} is over: {job.state}")
    return JobObject.of(job)


def _jobs(request: Request) -> Jobs:
    return Jobs(request.app.state.engine)


@asynccontextmanager
async def _handed_in(request: Request) -> AsyncIterator[tuple[JobRequest, UploadFile | None]]:
    """The request, and its file while the block lasts."""
    if is_form(request):
        async with form_of(request, request.app.state.settings.max_upload) as form:
            texts, _ = parts(form, "file")
            texts.pop("file", None)  # which `file_of` refuses
            yield _from_texts(texts), file_of(form) if "file" in form else None
    else:
        yield parse(JobRequest, await read_body(request)), None


def _from_texts(values: dict[str, str]) -> JobRequest:
    parameters = _json_object(values.pop("parameters", "{}"))
    own = {name: values.pop(name) for name in ("flow", "priority") if name in values}
    if twice := parameters.keys() & values.keys():
        name = shortened(min(twice))
        raise InvalidRequest(f"{name!r} is given as a field and in 'parameters'", param=name)
    return parsed(JobRequest, {**own, "parameters": {**parameters, **values}})


def _json_object(text: str) -> dict[str, Any]:
    try:
        values = from_json(text)  # refuses lone surrogates, and what is nested too deeply
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InvalidRequest("'parameters' must be a JSON object", param="parameters")
    return values


def _with_file(entry: Entry, asked: JobRequest, upload: UploadFile | None, job_id: str) -> dict[str, Any]:
    """The flow's parameters, with the upload by reference. Only we may name a reference: it is read."""
    takes_file = "file" in entry.request.model_fields
    if "file" in asked.parameters or (takes_file and upload is None):
        raise InvalidRequest(
            "send the file itself as multipart/form-data, in the field 'file'"
            if takes_file
            else f"flow {asked.flow!r} has no parameter 'file'",
            param="file",
        )
    if upload is None:
        return asked.parameters
    kind: Any = entry.request.model_fields["file"].annotation if takes_file else Media
    media = kind(reference=input_reference(job_id, "file"), name=upload.filename or "")
    return {**asked.parameters, "file": media}
