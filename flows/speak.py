"""Speak: say a text."""

from __future__ import annotations

from prefect import flow

from tasks.audio import Speech, say
from tasks.protocol.shapes import SpeechParameters


class SpeakRequest(SpeechParameters):
    """A text for a model, by its name or alias in the catalogue; empty means the first of its kind."""

    model: str = ""


@flow(name="speak")
async def speak(request: SpeakRequest) -> Speech:
    return await say(request.model, request)
