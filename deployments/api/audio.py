"""POST /v1/audio/transcriptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from blocks.errors import InvalidMedia, InvalidRequest
from blocks.storage import Media
from deployments.api import parameters
from deployments.api.body import limited
from deployments.api.disconnect import ClientPresent
from deployments.api.errors import shortened, told
from deployments.api.live import json_response, named, origin, origin_headers, recorder_of
from flows.live import run_live
from flows.transcribe import TranscribeRequest, transcribe
from tasks.live import LiveRun
from tasks.protocol.shapes import TranscriptionParameters, TranscriptionResult


class TranscriptionForm(TranscriptionParameters):
    """The form's fields besides `file`."""

    model: Annotated[str, Field(min_length=1)]
    response_format: Literal["json", "text"] = "json"


async def create_transcription(request: Request) -> Response:
    """`response_format` is `json` or `text`."""
    async with form_of(request, request.app.state.settings.max_upload) as form:
        asked = fields(form)
        await named(asked.model, "transcription")
        upload = file_of(form)
        recording = TranscribeRequest(
            **asked.model_dump(exclude={"response_format"}),
            file=Media.upload(upload.file, upload.filename or ""),
        )
        run = LiveRun(transcribe.name, request.state.request_id)
        async with ClientPresent(request.receive):
            result = await run_live(transcribe, run, recorder_of(request), recording)
    if asked.response_format == "text":
        return PlainTextResponse(result.text + "\n", headers=origin_headers(run))
    return json_response(_told(run, result), run)


def _told(run: LiveRun, result: TranscriptionResult) -> dict[str, object]:
    usage = {"type": "duration", "seconds": result.duration}
    return {"text": result.text, "usage": usage, "smi": origin(run)}


@asynccontextmanager
async def form_of(request: Request, max_bytes: int) -> AsyncIterator[FormData]:
    """The request's multipart form; large files are on disk until the block ends.

    Raises:
        InvalidRequest: it is not a multipart form, or not in UTF-8.
        PayloadTooLarge: it has more than `max_bytes`.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidRequest("send the recording as multipart/form-data, in the field 'file'")
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise InvalidRequest(f"charset {shortened(charset)!r} is not taken; send the form in UTF-8")
    whole = Request(request.scope, limited(request, max_bytes))
    try:
        async with whole.form(max_files=1, max_fields=32) as form:
            yield form
    except HTTPException as error:
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from error


def fields(form: FormData) -> TranscriptionForm:
    """The form's text fields, checked. Raises `InvalidRequest` naming the first one at fault."""
    texts: dict[str, str] = {}
    for name, value in form.multi_items():
        if name == "file":
            continue
        if name in texts and name in TranscriptionForm.model_fields:
            raise InvalidRequest(f"{name!r} is given more than once", param=name)
        if not isinstance(value, str):
            raise InvalidRequest(f"{name!r} is not a file; the recording belongs in 'file'", param=name)
        texts[name] = value
    known = {name: texts[name] for name in texts if name in TranscriptionForm.model_fields}
    others = {name: value for name, value in texts.items() if name not in known}
    parameters.refuse_others(others, parameters.TRANSCRIPTION, [*TranscriptionForm.model_fields, "file"])
    try:
        return TranscriptionForm.model_validate(known)
    except ValidationError as error:
        raise told(error) from None


def file_of(form: FormData) -> UploadFile:
    """The form's one file. Raises `InvalidRequest` if there is none, `InvalidMedia` if it is empty."""
    file = form.get("file")
    if file is None:
        raise InvalidRequest("'file' is missing: the recording, as a file of the form", param="file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("'file' must be a file of the form (with a filename), not text", param="file")
    if not file.size:
        raise InvalidMedia("'file' is empty (0 bytes)", param="file")
    return file
