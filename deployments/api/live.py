"""What the routes of live requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.direct import Endpoint
from flows.live import Recorder
from tasks.fleet import current_fleet
from tasks.live import LiveRun
from tasks.principal import Principal


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
    key = request.state.key
    # Until keys have policies of their own, a key may do what this installation can.
    return LiveRun(flow, request.state.request_id, principal=Principal(key.name, key.id, "any"))


def recorder_of(request: Request) -> Recorder:
    recorder: Recorder = request.app.state.recorder
    return recorder


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
