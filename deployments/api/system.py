"""GET /health and /metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tasks.fleet import current_fleet

router = APIRouter(tags=["system"])


class Health(BaseModel):
    """Which parts are up. The API itself is: it answers.

    Attributes:
        nodes: how many are connected.
        database: whether keys can be read; those already known stay good without it.
        record: why live requests are not recorded in Prefect just now, else "ok".
    """

    status: Literal["ok", "degraded"]
    nodes: int
    database: Literal["ok", "away"]
    record: str
    record_lag_s: float


@router.head("/health", include_in_schema=False)  # as load balancers ask
@router.get("/health", summary="Which parts are up")
async def health(request: Request) -> Health:
    state = request.app.state
    nodes = len((await current_fleet()).nodes)
    record = state.recorder.status()
    whole = bool(nodes) and state.keys.reachable and not record.error
    return Health(
        status="ok" if whole else "degraded",
        nodes=nodes,
        database="ok" if state.keys.reachable else "away",
        record="away" if record.error else "ok",
        record_lag_s=round(record.lag_s, 3),
    )


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
