"""POST /v1/audio/transcriptions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from blocks.storage import Recording
from deployments.api.docs import takes_form
from deployments.api.forms import fields, file_of, form_of
from deployments.api.live import LiveRoute, answered, json_response, named, origin, origin_headers
from deployments.api.parameters import TRANSCRIPTION
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
        asked = fields(form, TranscriptionForm, TRANSCRIPTION)
        await named(asked.model, "transcription")
        upload = file_of(form)
        recording = TranscribeRequest(
            **asked.model_dump(exclude={"response_format"}),
            file=Recording.upload(upload.file, upload.filename or ""),
        )
        result, run = await answered(request, transcribe, recording)
    if asked.response_format == "text":
        return PlainTextResponse(result.text + "\n", headers=origin_headers(run))
    return json_response(_told(run, result), run)


def _told(run: LiveRun, result: TranscriptionResult) -> dict[str, object]:
    usage = {"type": "duration", "seconds": result.duration}
    return {"text": result.text, "usage": usage, "smi": origin(run)}


ROUTES = (
    LiveRoute(
        "/v1/audio/transcriptions",
        create_transcription,
        "audio",
        "Write down what is said in a recording",
        takes_form(TranscriptionForm, file="the recording: any container FFmpeg reads"),
    ),
)
