"""What the routes of live requests share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from prefect import Flow
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blocks.errors import Cancelled, SmiError
from deployments.api.direct import Endpoint
from deployments.api.disconnect import ClientPresent
from deployments.api.errors import error_body, unexpected
from flows.live import run_live
from tasks.fleet import current_fleet
from tasks.live import LiveRun

EVENTS = "text/event-stream; charset=utf-8"
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LiveRoute:
    """A POST route that is answered before FastAPI's stack, and how it is documented."""

    path: str
    endpoint: Endpoint
    tag: str
    summary: str
    takes: dict[str, Any]


def live_run(request: Request, flow: str) -> LiveRun:
    """A run of the flow named `flow`, on behalf of the request's key."""
    return LiveRun(flow, request.state.request_id, principal=request.state.key.principal)


async def answered(
    request: Request, flow: Flow[Any, Coroutine[Any, Any, R]], question: BaseModel
) -> tuple[R, LiveRun]:
    """What `flow` returns, and its run, which is recorded. Once the client leaves, it is cancelled."""
    run = live_run(request, flow.name)
    async with ClientPresent(request.receive):
        return await run_live(flow, run, request.app.state.recorder, question), run


async def named(model: str, task: str) -> str:
    """The catalogue's name of a model for `task`, by name or alias. Raises `ModelNotFound`."""
    return (await current_fleet()).catalogue.get(model, task).name


def origin(run: LiveRun) -> dict[str, str]:
    """Where `run`'s answer came from: field `smi` of an answer."""
    labels = run.labels
    return {
        "tier": str(labels.get("tier", "")),
        "model": str(labels.get("model", "")),
        "node": str(labels.get("node", "")),
        "request_id": run.request_id,
    }


def origin_headers(run: LiveRun) -> dict[str, str]:
    return {"x-smi-tier": str(run.labels.get("tier", "")), "x-smi-model": str(run.labels.get("model", ""))}


def json_response(content: object, run: LiveRun) -> Response:
    return Response(to_json(content), 200, origin_headers(run), "application/json")


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


class LiveStream(Response):
    """Runs a flow while it answers: each delta goes to the socket from inside the flow's own task.

    The flow waits while the client is slow, and so does the node (`ahead.StreamAhead` does without that).
    Until the first delta an error is an ordinary one; after it, it is the last event. Where there are no
    events, the connection is broken, so that nobody takes a part for the whole.

    Attributes:
        flow: what is run.
        in_events: whether the answer is server-sent events.
        started: whether anything was sent.
    """

    background = None
    flow: ClassVar[Flow[Any, Any]]
    in_events: ClassVar[bool] = True

    def __init__(self, request: Request, question: BaseModel) -> None:
        self.run, self.question = live_run(request, self.flow.name), question
        self.run.sink = self.delta
        self.started = False
        self._begun: float = request.state.begun
        self._until_first = request.app.state.metrics.ttft.labels(request.scope["route"].path)
        self._recorder = request.app.state.recorder

    @abstractmethod
    async def delta(self, delta: Any) -> None:
        """Send what the flow emits; before the first, `start`."""

    @abstractmethod
    async def ending(self, result: Any) -> bytes:
        """What follows the last delta. `result` is the flow's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            async with ClientPresent(receive):
                result = await run_live(self.flow, self.run, self._recorder, self.question)
        except Cancelled:
            raise
        except Exception as error:
            if not (self.started and self.in_events):
                raise
            told = error if isinstance(error, SmiError) else unexpected(error, self.run.request_id)
            await self.write(b"data: " + error_body(told) + b"\n\n", more=False)
            return
        await self.write(await self.ending(result), more=False)

    async def start(self, content_type: str = EVENTS) -> None:
        """Send status and headers."""
        self.started = True
        self._until_first.observe(time.perf_counter() - self._begun)
        headers = {
            "content-type": content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **origin_headers(self.run),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
