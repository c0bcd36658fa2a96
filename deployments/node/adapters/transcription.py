"""Transcription: a recording in chunks, decoded, and its text segment by segment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from tempfile import SpooledTemporaryFile, TemporaryFile
from typing import IO, Any

from blocks.errors import UpstreamFailed
from deployments.node.adapters.audio import decode
from deployments.node.adapters.base import Adapter, Emit, working
from deployments.node.adapters.upload import IN_MEMORY, spool
from deployments.node.bridge import driving
from deployments.node.drivers.base import Speech, TranscriptionDriver
from tasks.protocol.inference_pb2 import Done, Event, Text, Usage
from tasks.protocol.shapes import Segment, TranscriptionParameters, TranscriptionResult

MAX_BYTES = 1 << 30


class TranscriptionAdapter(Adapter[TranscriptionDriver, TranscriptionParameters]):
    """OpenAI's transcription over any `TranscriptionDriver`. `Done.result` is a `TranscriptionResult`.

    Recording and samples lie in temporary files, so that memory does not grow with their length.
    """

    shape = TranscriptionParameters

    async def run(
        self, parameters: TranscriptionParameters, media: AsyncIterator[bytes], emit: Emit | None
    ) -> Done:
        with SpooledTemporaryFile(IN_MEMORY) as upload, TemporaryFile() as samples:
            await spool(media, upload, MAX_BYTES, "recording")
            async with driving(partial(decode, upload, samples, self.driver.sample_rate)) as steps:
                async for _ in steps:
                    pass
            samples.flush()
            result = await self._write_down(_mapped(samples), parameters, emit)
        return Done(
            finish_reason="stop",
            result=result.model_dump_json().encode(),
            usage=Usage(audio_seconds=result.duration),
        )

    async def _write_down(
        self, audio: Any, parameters: TranscriptionParameters, emit: Emit | None
    ) -> TranscriptionResult:
        speech: Speech | None = None
        segments: list[Segment] = []
        text = ""
        async with driving(partial(self.driver.run, audio, parameters)) as items:
            async for item in items:
                if isinstance(item, Speech):
                    speech = item
                    continue
                said = item.text.rstrip() if text else item.text.strip()
                text += said
                segments.append(item.model_copy(update={"text": said.strip()}))
                if emit is not None and speech is not None:
                    await emit(Event(text=Text(text=said)))
                    done = min(1.0, item.end / speech.duration)
                    await emit(working(done))
        if speech is None:
            raise UpstreamFailed(f"model {self.driver.model.name} broke off its transcript; try again")
        return TranscriptionResult(
            text=text, language=speech.language, duration=speech.duration, segments=segments
        )


def _mapped(samples: IO[bytes]) -> Any:
    """The samples as an array whose memory is the file's."""
    import numpy

    return numpy.memmap(samples, dtype=numpy.float32, mode="r").view(numpy.ndarray)
