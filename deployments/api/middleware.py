"""The one middleware: request id, key, figures, and the last word on errors.

Pure ASGI: `receive` is passed on untouched, so that a client that leaves is noticed.
"""

from __future__ import annotations

import random
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocks.errors import Cancelled, InvalidRequest, SmiError
from blocks.settings import Settings
from deployments.api.auth import PUBLIC, authenticate, signed
from deployments.api.errors import error_response, unexpected
from deployments.api.keys import Keys
from deployments.api.metrics import Metrics

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """Sets `request.state.request_id` and, where a key is needed, `request.state.key`: a `KeyInfo`, or None
    for a signed link."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics, settings: Settings) -> None:
        self.app, self.keys, self.metrics, self.settings = app, keys, metrics, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        usable = given is not None and REQUEST_ID.fullmatch(given) is not None
        request_id = given if given and usable else b"req_%024x" % random.getrandbits(96)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["begun"] = begun
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        self.metrics.in_flight.inc()
        try:
            if given is not None and not usable:
                raise InvalidRequest(
                    "header x-request-id must be 1 to 64 letters, digits, '.', '_' or '-'",
                    param="x-request-id",
                )
            if signed(self.settings, scope["method"], scope["path"], scope["query_string"]):
                state["key"] = None
            elif scope["path"] not in PUBLIC:
                state["key"] = await authenticate(self.keys, headers.get(b"authorization"))
            await self.app(scope, receive, answer)
        except Exception as error:  # noqa: BLE001 (logged by `unexpected`; nothing may reach the server)
            told = error if isinstance(error, SmiError) else unexpected(error, state["request_id"])
            if status and isinstance(told, Cancelled):
                return  # the client has left in the midst of its answer
            if status:
                # Too late for another answer: the server must break the connection.
                raise ConnectionAbortedError("an answer broke off") from None
            await error_response(told)(scope, receive, answer)
        finally:
            self.metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, status).inc()
            self.metrics.latency.labels(route).observe(time.perf_counter() - begun)
