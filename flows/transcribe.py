"""Transcribe: write down what is said in a recording."""

from __future__ import annotations

from prefect import flow

from blocks.storage import Recording
from tasks.audio import hear
from tasks.protocol.shapes import TranscriptionParameters, TranscriptionResult


class TranscribeRequest(TranscriptionParameters):
    """A recording for a model, by its name or alias in the catalogue; empty means the first of its kind."""

    model: str = ""
    file: Recording


@flow(name="transcribe")
async def transcribe(request: TranscribeRequest) -> TranscriptionResult:
    return await hear(request.model, request.file, request)
