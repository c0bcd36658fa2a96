"""Routes that are answered before FastAPI's stack, for requests where tenths of milliseconds count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """`app`, with the routes of `endpoints` called without its layers: routing, exit stacks, telemetry.

    FastAPI knows these routes as well, documents them and refuses other methods.

    Args:
        around: what is around them nevertheless; as FastAPI's middleware is around all others.
    """

    def __init__(
        self, app: FastAPI, endpoints: Collection[Endpoint], around: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        self.app = app
        self._direct = around(_call)
        self._routes = {
            (method, route.path): route
            for route in app.routes
            if isinstance(route, APIRoute) and route.endpoint in endpoints
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["app"], scope["route"] = self.app, route
        await self._direct(scope, receive, send)


async def _call(scope: Scope, receive: Receive, send: Send) -> None:
    response = await scope["route"].endpoint(Request(scope, receive, send))
    await response(scope, receive, send)
