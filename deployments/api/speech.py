"""POST /v1/audio/speech."""

from __future__ import annotations

import base64
from typing import Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.api import parameters
from deployments.api.ahead import StreamAhead
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.api.live import LiveRoute, event, named, origin
from flows.speak import SpeakRequest, speak
from tasks.audio import Speech
from tasks.media import MediaDelta


class SpeechRequest(SpeakRequest):
    """OpenAI's speech, as far as this server honours it; anything else is refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1)
    stream_format: Literal["audio", "sse"] = "audio"

    def checked(self) -> SpeakRequest:
        """The flow's request. Raises `InvalidRequest` for what cannot be honoured."""
        parameters.refuse_others(self.model_extra, parameters.SPEECH, type(self).model_fields)
        return self


async def create_speech(request: Request) -> Response:
    """The sound, sent as it is made. With `stream_format` `sse` it comes in events instead.

    A connection that breaks off, or an event `error`, means that the sound is not whole.
    """
    asked = parse(SpeechRequest, await read_body(request))
    text = asked.checked()
    await named(text.model, "speech")
    stream = EventStream if asked.stream_format == "sse" else SoundStream
    return stream(request, text)


class SoundStream(StreamAhead):
    """The bytes of the sound."""

    flow = speak
    in_events = False

    async def delta(self, delta: MediaDelta) -> None:
        if not self.started:
            await self.start(delta.content_type)
        await self.write(delta.data)

    async def ending(self, result: Speech) -> bytes:
        return b""


class EventStream(StreamAhead):
    """The same as server-sent events: `speech.audio.delta`, then `speech.audio.done` or an error."""

    flow = speak

    async def delta(self, delta: MediaDelta) -> None:
        if not self.started:
            await self.start()
        audio = base64.b64encode(delta.data).decode()
        await self.write(event({"type": "speech.audio.delta", "audio": audio}))

    async def ending(self, result: Speech) -> bytes:
        """Models here read tokens and make sound that is not counted in any; its seconds are in `smi`."""
        read = int(self.run.labels.get("prompt_tokens", 0))
        usage = {"input_tokens": read, "output_tokens": 0, "total_tokens": read}
        smi = origin(self.run) | {"seconds": result.seconds}
        return event({"type": "speech.audio.done", "usage": usage, "smi": smi})


ROUTES = (LiveRoute("/v1/audio/speech", create_speech, "audio", "Say a text", takes_json(SpeechRequest)),)
