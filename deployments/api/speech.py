"""POST /v1/audio/speech."""

from __future__ import annotations

import base64
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blocks.errors import Cancelled, SmiError
from deployments.api import parameters
from deployments.api.body import read_body
from deployments.api.disconnect import ClientPresent
from deployments.api.docs import takes_json
from deployments.api.errors import error_body, parse, unexpected
from deployments.api.live import LiveRoute, live_run, named, origin, origin_headers, recorder_of
from flows.live import Recorder, run_live
from flows.speak import SpeakRequest, speak
from tasks.audio import Speech
from tasks.live import LiveRun
from tasks.media import MediaDelta


class SpeechRequest(SpeakRequest):
    """OpenAI's speech, as far as this server honours it; anything else is refused by name."""

    model_config = ConfigDict(extra="allow")

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
    return stream(request, live_run(request, speak.name), text)


class SoundStream(Response):
    """Runs the flow while it answers: each piece of sound goes to the socket from inside the flow's own task.

    The flow waits while the client is slow, and so does the node. Until the first piece an error is an
    ordinary one; after it, the connection is broken, so that nobody takes a part for the whole.
    """

    background = None

    def __init__(self, request: Request, run: LiveRun, text: SpeakRequest) -> None:
        self.run, self.text = run, text
        self.recorder: Recorder = recorder_of(request)
        self.started = False
        run.sink = self._delta

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        async with ClientPresent(receive):
            await run_live(speak, self.run, self.recorder, self.text)
        await self._write(b"", more=False)

    async def _delta(self, delta: MediaDelta) -> None:
        if not self.started:
            await self._start(delta.content_type)
        await self._write(delta.data)

    async def _start(self, content_type: str) -> None:
        self.started = True
        headers = {
            "content-type": content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **origin_headers(self.run),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class EventStream(SoundStream):
    """The same as server-sent events: `speech.audio.delta`, then `speech.audio.done` or an error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            async with ClientPresent(receive):
                speech = await run_live(speak, self.run, self.recorder, self.text)
        except Cancelled:
            raise
        except Exception as error:
            if not self.started:
                raise
            told = error if isinstance(error, SmiError) else unexpected(error, self.run.request_id)
            await self._write(b"data: " + error_body(told) + b"\n\n", more=False)
            return
        await self._write(_event("speech.audio.done", **self._ending(speech)), more=False)

    async def _delta(self, delta: MediaDelta) -> None:
        if not self.started:
            await self._start("text/event-stream; charset=utf-8")
        await self._write(_event("speech.audio.delta", audio=base64.b64encode(delta.data).decode()))

    def _ending(self, speech: Speech) -> dict[str, Any]:
        """Models here read tokens and make sound that is not counted in any; its seconds are in `smi`."""
        read = int(self.run.labels.get("prompt_tokens", 0))
        return {
            "usage": {"input_tokens": read, "output_tokens": 0, "total_tokens": read},
            "smi": origin(self.run) | {"seconds": speech.seconds},
        }


def _event(kind: str, **content: Any) -> bytes:
    return b"data: " + to_json({"type": kind, **content}) + b"\n\n"


ROUTES = (LiveRoute("/v1/audio/speech", create_speech, "audio", "Say a text", takes_json(SpeechRequest)),)
