"""Steps that hear and speak."""

from __future__ import annotations

import io
import struct
from typing import BinaryIO

from pydantic import BaseModel

from blocks.storage import Media, Recording
from tasks.dispatch import infer
from tasks.job import Priority
from tasks.live import label
from tasks.media import produce
from tasks.protocol.shapes import (
    SpeechParameters,
    SpeechResult,
    TranscriptionParameters,
    TranscriptionResult,
)
from tasks.step import step


class Speech(BaseModel):
    """A text as sound; `seconds` long."""

    audio: Recording
    seconds: float


@step
async def hear(
    model: str, audio: Media, parameters: TranscriptionParameters, priority: Priority | None = None
) -> TranscriptionResult:
    """Write down what is said in `audio` (any container that PyAV reads)."""
    done = await infer("transcription", model, parameters, media=audio, priority=priority)
    result = TranscriptionResult.model_validate_json(done.result)
    label(audio_seconds=result.duration)
    return result


@step
async def say(model: str, parameters: SpeechParameters, priority: Priority | None = None) -> Speech:
    """Say a text; pieces of sound are emitted where a client waits for them."""
    audio, done = await produce(
        "speech",
        model,
        parameters,
        kind=Recording,
        name=f"speech.{parameters.response_format}",
        priority=priority,
        completed=_say_length if parameters.response_format == "wav" else None,
    )
    seconds = SpeechResult.model_validate_json(done.result).seconds
    label(audio_seconds=seconds, prompt_tokens=done.usage.prompt_tokens)
    return Speech(audio=audio, seconds=seconds)


def _say_length(wav: BinaryIO) -> None:
    """Write its lengths into a WAV that was made as a stream, whose header leaves them open."""
    wav.seek(0)
    if wav.read(44)[36:] != b"data\xff\xff\xff\xff":
        return
    size = wav.seek(0, io.SEEK_END)
    for at in (4, 40):  # each counts the bytes that follow it
        wav.seek(at)
        wav.write(struct.pack("<I", size - at - 4))
