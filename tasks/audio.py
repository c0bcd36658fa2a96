"""Steps that hear."""

from __future__ import annotations

from blocks.storage import Media
from tasks.dispatch import Priority, infer
from tasks.live import label
from tasks.protocol.shapes import TranscriptionParameters, TranscriptionResult
from tasks.step import step


@step
async def hear(
    model: str, audio: Media, parameters: TranscriptionParameters, priority: Priority | None = None
) -> TranscriptionResult:
    """Write down what is said in `audio` (any container that PyAV reads)."""
    done = await infer("transcription", model, parameters, media=audio, priority=priority)
    result = TranscriptionResult.model_validate_json(done.result)
    label(audio_seconds=result.duration)
    return result
