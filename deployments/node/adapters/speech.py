"""Speech: a text said, and encoded piece by piece as it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from blocks.errors import InvalidRequest, UpstreamFailed
from blocks.validation import quoted
from deployments.node.adapters.base import Adapter, Emit, send, streamed, working
from deployments.node.adapters.encode import RATE, SoundEncoder
from deployments.node.bridge import driving
from deployments.node.drivers.base import Prompt, SpeechDriver, Working
from tasks.protocol.inference_pb2 import Done, Usage
from tasks.protocol.shapes import SpeechParameters, SpeechResult

AHEAD = 2  # pieces that a driver may be ahead of the encoder, or of a slow client: each may be megabytes


class SpeechAdapter(Adapter[SpeechDriver, SpeechParameters]):
    """OpenAI's speech over any `SpeechDriver`: sound in media events. `Done.result` is a `SpeechResult`."""

    shape = SpeechParameters

    async def run(self, parameters: SpeechParameters, media: AsyncIterator[bytes], emit: Emit | None) -> Done:
        emit = streamed(emit)
        parameters = parameters.model_copy(update={"voice": self._voice(parameters.voice)})
        rate = self.driver.sample_rate
        encoder = SoundEncoder(parameters.response_format, rate)
        tokens = samples = 0
        async with driving(partial(self.driver.run, parameters), AHEAD) as items:
            async for item in items:
                if isinstance(item, Prompt):
                    tokens = item.tokens
                elif isinstance(item, Working):
                    await emit(working(item.fraction))
                else:
                    samples += len(item)
                    await send(await asyncio.to_thread(encoder.encode, item), encoder.content_type, emit)
        if not samples:
            raise UpstreamFailed(f"model {self.driver.model.name} made no sound; try again")
        await send(await asyncio.to_thread(encoder.finish), encoder.content_type, emit)
        seconds = samples / rate
        result = SpeechResult(content_type=encoder.content_type, sample_rate=RATE, seconds=seconds)
        return Done(
            finish_reason="stop",
            result=result.model_dump_json().encode(),
            usage=Usage(prompt_tokens=tokens, audio_seconds=seconds),
        )

    def _voice(self, asked: str) -> str:
        voices = self.driver.voices
        if asked and asked not in voices:
            raise InvalidRequest(
                f"model {self.driver.model.name!r} has no voice {quoted(asked)}; it has: {', '.join(voices)}",
                param="voice",
            )
        return asked or voices[0]
