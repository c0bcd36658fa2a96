"""POST /v1/pipelines: a job of several steps. GET /v1/jobs/{id}/steps/{step}: what one of them returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, TypeAdapter
from pydantic import ValidationError as Invalid
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import Conflict, InvalidMedia, InvalidRequest, NotFound
from blocks.validation import said, shortened
from blocks.yaml import MAX_TEXT, read_yaml
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.api.forms import form_of, is_form, parts
from deployments.api.intake import accept, input_reference
from deployments.api.jobs import JobId, JobObject
from deployments.jobs.requests import parsed
from deployments.jobs.store import OPEN, Jobs, new_job_id
from deployments.jobs.stored import Stored, StoredRequest
from flows.definition import FILES, MAX_INPUTS, VALUES, Pipeline
from flows.pipeline import PipelineRequest, pipeline, step_reference
from flows.registry import FLOWS
from tasks.fleet import current_fleet
from tasks.job import Priority

router = APIRouter(prefix="/v1", tags=["pipelines"])
OWN = "inputs."  # what fields of the form begin with that are the pipeline's inputs
MAX_BODY = 4 * MAX_TEXT  # bytes of JSON; longer texts come in a form


class PipelineSubmission(BaseModel):
    """A pipeline, as an object or as YAML text, and the values of its inputs. Files come in a form: fields
    `pipeline` (text or a file), `priority`, and `inputs.NAME` for each value and file."""

    model_config = ConfigDict(extra="forbid")

    pipeline: dict[str, Any] | str
    inputs: dict[str, StrictBool | StrictInt | StrictFloat | str] = Field(default_factory=dict)
    priority: Priority = "normal"


class PipelineToSubmit(PipelineSubmission):
    """As /docs shows it: a pipeline is validated apart, for errors that name the parameter at fault."""

    pipeline: Pipeline | str  # type: ignore[assignment]


@dataclass(slots=True)
class HandedIn:
    """A pipeline with its inputs: values, and uploads, by name."""

    pipeline: Pipeline
    values: dict[str, Any]
    priority: Priority
    uploads: dict[str, UploadFile] = field(default_factory=dict)


@router.post(
    "/pipelines",
    status_code=202,
    summary="Hand in a pipeline: JSON, or a form with files",
    openapi_extra=takes_json(PipelineToSubmit),
)
async def submit_pipeline(request: Request) -> JobObject:
    """It is checked as a whole before anything runs. With the header `Idempotency-Key`, handing in the same
    pipeline again gives the job of the first time."""
    async with _handed_in(request) as given:
        job_id = new_job_id()
        files = {name: _media(given, name, job_id) for name in given.uploads}
        values = {"pipeline": given.pipeline, "inputs": {**given.values, **files}}
        content = await asyncio.to_thread(parsed, PipelineRequest, values)
        asked = [given.pipeline.model_dump(mode="json"), given.values, given.priority]
        entry, priority = FLOWS[pipeline.name], given.priority
        job = await accept(request, entry, job_id, content, given.uploads, asked=asked, priority=priority)
        return JobObject.of(job)


def _media(given: HandedIn, name: str, job_id: str) -> Any:
    """An upload by reference, as what the pipeline says it is."""
    asked, upload = given.pipeline.inputs.get(name), given.uploads[name]
    param = f"{OWN}{shortened(name)}"
    if asked is None:
        there = ", ".join(given.pipeline.inputs) or "none"
        raise InvalidRequest(f"{param!r} is no input of this pipeline; there are: {there}", param=param)
    if asked.type not in FILES:
        raise InvalidRequest(f"{param!r} is a {asked.type}, not a file; send its value as text", param=param)
    if not upload.size:
        raise InvalidMedia(f"{param!r} is empty (0 bytes)", param=param)
    return FILES[asked.type](reference=input_reference(job_id, name), name=upload.filename or "")


@asynccontextmanager
async def _handed_in(request: Request) -> AsyncIterator[HandedIn]:
    """What the client sent; its files while the block lasts."""
    if is_form(request):
        most = request.app.state.settings.max_upload
        async with form_of(request, most, max_files=MAX_INPUTS + 1, file=f"{OWN}NAME") as form:
            yield await _from_form(form)
    else:
        body = await read_body(request, MAX_BODY)
        asked = parse(PipelineSubmission, body)
        await asyncio.to_thread(json.loads, body, object_pairs_hook=_once)
        yield HandedIn(await _defined(asked.pipeline), dict(asked.inputs), asked.priority)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Two steps of one name are a mistake, of which the first would be lost."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise InvalidRequest(f"{shortened(name)!r} stands twice in one object", param=shortened(name))
        values[name] = value
    return values


async def _defined(given: dict[str, Any] | str) -> Pipeline:
    if isinstance(given, str):
        given = await asyncio.to_thread(read_yaml, given, "pipeline")
        if not isinstance(given, dict):
            raise InvalidRequest("'pipeline' must be an object: name, inputs, steps", param="pipeline")
    return parsed(Pipeline, given)


async def _from_form(form: FormData) -> HandedIn:
    texts, uploads = parts(form)
    source = uploads.pop("pipeline", None)
    text = texts.pop("pipeline", None) if source is None else await _text(source)
    if text is None:
        raise InvalidRequest("'pipeline' is missing: YAML or JSON, as text or as a file", param="pipeline")
    priority = texts.pop("priority", "normal")
    for name in (*texts, *uploads):
        if not name.startswith(OWN):
            param = shortened(name)
            raise InvalidRequest(
                f"{param!r} is not a field here; there are: pipeline, priority, {OWN}NAME", param=param
            )
    defined = await _defined(text)
    values = {name.removeprefix(OWN): value for name, value in texts.items()}
    return HandedIn(
        defined,
        {name: _read(defined, name, value) for name, value in values.items()},
        parsed(_Choice, {"priority": priority}).priority,
        {name.removeprefix(OWN): upload for name, upload in uploads.items()},
    )


class _Choice(BaseModel):
    priority: Priority


async def _text(source: UploadFile) -> str:
    content = await source.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise InvalidRequest(f"'pipeline' may have at most {MAX_TEXT} bytes", param="pipeline")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("'pipeline' is not text in UTF-8", param="pipeline") from None


def _read(defined: Pipeline, name: str, text: str) -> Any:
    """A value that came as text, as what the pipeline says it is."""
    asked = defined.inputs.get(name)
    if asked is None or asked.type not in VALUES:
        return text
    try:
        return TypeAdapter(VALUES[asked.type]).validate_python(text)
    except Invalid as error:
        param = f"{OWN}{name}"
        raise InvalidRequest(f"{param!r} is wrong: {said(error.errors()[0])}", param=param) from None


@router.get("/jobs/{job_id}/steps/{step}", summary="How one step of a pipeline ended", response_model=None)
async def get_step(request: Request, job_id: JobId, step: str) -> Response:
    """The step's outcome as JSON, with what its flow returned in `result`, also of a job that failed; 409
    while it is not finished."""
    job = await Jobs(request.app.state.engine).get(job_id, request.state.key.id)
    stored, storage = Stored.of(job.id, max(job.attempt, 1)), (await current_fleet()).storage
    if job.flow != pipeline.name:
        raise NotFound(f"job {job_id} is no pipeline; GET /v1/jobs/{job_id}/result has its result")
    content = await asyncio.to_thread(storage.read_shared, stored.reference)
    steps = StoredRequest.model_validate_json(content).request["pipeline"]["steps"]
    if step not in steps:
        raise NotFound(f"job {job_id} has no step {shortened(step)!r}; there are: {', '.join(steps)}")
    reference = step_reference(stored.folder, step)
    try:
        outcome = await asyncio.to_thread(storage.read, reference)
    except NotFound:
        if job.state == "succeeded":
            raise storage.not_shared(reference) from None
        if job.state in OPEN:
            raise Conflict(f"step {step!r} of job {job_id} is not finished", retry_after=1) from None
        raise Conflict(f"job {job_id} was over ({job.state}) before its step {step!r} was") from None
    return Response(outcome, media_type="application/json")
