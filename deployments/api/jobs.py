"""/v1/jobs: requests that run in the background and outlive their client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import Conflict, InvalidRequest, NotFound, SmiError
from blocks.storage import CHUNK, Media, Storage
from deployments.api.audio import file_of, form_of
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.database import unfit
from deployments.jobs.requests import heaviest_model, parsed
from deployments.jobs.store import Job, Jobs, JobState, Submission, new_job_id
from deployments.jobs.stored import Failure, Stored
from flows.registry import Entry, flow_named
from tasks.dispatch import Priority
from tasks.fleet import current_fleet

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
    def of(cls, job: Job) -> JobObject:
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
        )


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
        entry = flow_named(asked.flow)
        job_id = new_job_id()
        values = _with_file(entry, asked, upload, job_id)
        content = parsed(entry.request, values, strict=not _is_form(request))
        model = heaviest_model(entry, content, (await current_fleet()).catalogue)
        digest = await _digest(asked, upload)
        job = Submission(
            id=job_id,
            request_id=request.state.request_id,
            key_id=request.state.key.id,
            flow=entry.flow.name,
            model=model,
            priority=asked.priority,
            digest=digest,
            idempotency_key=_idempotency_key(request),
        )
        file = upload.file if upload else None
        storage = (await current_fleet()).storage
        return JobObject.of(await _accepted(storage, _jobs(request), job, content, file))


@router.get("", summary="Your jobs, newest first")
async def list_jobs(request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> JobList:
    jobs = await _jobs(request).list(request.state.key.id, limit)
    return JobList(data=[JobObject.of(job) for job in jobs])


@router.get("/{job_id}", summary="One job")
async def get_job(request: Request, job_id: JobId) -> JobObject:
    return JobObject.of(await _jobs(request).get(job_id, request.state.key.id))


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
    stored = await asyncio.to_thread(storage.read, Stored.of(job.id, job.attempt).result)
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


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest("header Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
    return key


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


@asynccontextmanager
async def _handed_in(request: Request) -> AsyncIterator[tuple[JobRequest, UploadFile | None]]:
    """The request, and its file while the block lasts."""
    if _is_form(request):
        async with form_of(request, request.app.state.settings.max_upload) as form:
            fields = [(name, value) for name, value in form.multi_items() if name != "file"]
            yield _from_fields(fields), file_of(form) if "file" in form else None
    else:
        yield parse(JobRequest, await read_body(request)), None


def _from_fields(fields: list[tuple[str, Any]]) -> JobRequest:
    values: dict[str, Any] = {}
    for name, value in fields:
        if not isinstance(value, str):
            raise InvalidRequest(f"{name!r} is not a file; the file belongs in 'file'", param=name)
        if name in values:
            raise InvalidRequest(f"{name!r} is given more than once", param=name)
        values[name] = value
    parameters = _json_object(values.pop("parameters", "{}"))
    own = {name: values.pop(name) for name in ("flow", "priority") if name in values}
    if twice := parameters.keys() & values.keys():
        name = min(twice)
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
    media = Media(reference=_upload_reference(job_id), name=upload.filename or "")
    return {**asked.parameters, "file": media}


def _upload_reference(job_id: str) -> str:
    return f"jobs/{job_id}/file"


async def _accepted(
    storage: Storage, jobs: Jobs, job: Submission, content: BaseModel, file: BinaryIO | None
) -> Job:
    """Store the job's files and accept it. They go again unless it is accepted, and as a new one."""
    stored = needed = False
    try:
        await asyncio.to_thread(_store, storage, job.id, content, file)
        stored = True
        accepted = await jobs.add(job)
        needed = accepted.id == job.id
    except BaseException as error:
        # A database that broke off may have accepted it: then they must stay.
        needed = stored and not (isinstance(error, SmiError) or unfit(error))
        raise
    finally:
        if not needed:
            await asyncio.to_thread(storage.remove, f"jobs/{job.id}")
    return accepted


def _store(storage: Storage, job_id: str, content: BaseModel, file: BinaryIO | None) -> None:
    if file is not None:
        file.seek(0)
        storage.write(_upload_reference(job_id), file)
    storage.write(Stored.of(job_id).reference, content.model_dump_json(exclude_unset=True).encode())


async def _digest(asked: JobRequest, upload: UploadFile | None) -> str:
    """Equal for equal requests, whatever the order of their parameters."""
    seen = hashlib.sha256(json.dumps(asked.model_dump(), sort_keys=True).encode())

    def add(file: BinaryIO) -> None:
        file.seek(0)
        while block := file.read(CHUNK):
            seen.update(block)

    if upload is not None:
        await asyncio.to_thread(add, upload.file)
    return seen.hexdigest()
