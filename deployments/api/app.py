"""The application: routes, and what lives as long as the process.

`app.state` holds `settings`, `engine` (SQLAlchemy), `keys`, `recorder` and `metrics` for the routes.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from blocks.settings import Settings
from deployments.api import (
    audio,
    chat,
    embeddings,
    images,
    indexes,
    jobs,
    models,
    pipelines,
    runs,
    speech,
    swagger,
    system,
)
from deployments.api.direct import DirectRoutes
from deployments.api.docs import document
from deployments.api.errors import add_error_handlers
from deployments.api.keys import Keys
from deployments.api.metrics import Metrics, Surroundings
from deployments.api.middleware import RequestMiddleware
from deployments.database import engine_for
from deployments.recorder.spool import SpoolRecorder
from tasks.fleet import close_fleet, current_fleet

DESCRIPTION = "OpenAI's API over your own machines. Key: `Authorization: Bearer sk-smi-...`."


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state
    await state.recorder.start()  # before gRPC has threads: it starts a process
    fleet = await current_fleet(state.settings)
    state.metrics.registry.register(Surroundings(state.recorder.status, lambda: len(fleet.nodes)))
    try:
        await state.keys.start()
        # What was imported stays, and collections need not look at it again.
        gc.collect()
        gc.freeze()
        yield
    finally:
        await state.recorder.stop()
        await state.keys.stop()
        await close_fleet()
        await state.engine.dispose()


LIVE = (*chat.ROUTES, *audio.ROUTES, *speech.ROUTES, *embeddings.ROUTES, *images.ROUTES)


def _add_live_routes(app: FastAPI) -> None:
    for route in LIVE:
        app.router.add_api_route(
            route.path,
            route.endpoint,
            methods=["POST"],
            tags=[route.tag],
            summary=route.summary,
            response_model=None,
            openapi_extra=route.takes,
        )


def create_app(settings: Settings) -> DirectRoutes:
    """The API of one installation. Needs `database_url`, `prefect_url`, `prefect_auth`, `join_token`.

    Raises:
        ConfigurationError: one of them is missing.
    """
    app = FastAPI(
        title="SMI",
        version=importlib.metadata.version("smi"),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    state = app.state
    state.settings = settings
    state.engine = engine_for(settings)
    state.keys = Keys(state.engine)
    state.metrics = Metrics()
    state.recorder = SpoolRecorder(settings)
    _add_live_routes(app)
    for module in (jobs, runs, pipelines, indexes, models, system, swagger):
        app.include_router(module.router)
    shared = {"keys": state.keys, "metrics": state.metrics, "settings": settings}
    app.add_middleware(RequestMiddleware, **shared)
    add_error_handlers(app)
    document(app)
    live = [route.endpoint for route in LIVE]
    return DirectRoutes(app, live, partial(RequestMiddleware, **shared))
