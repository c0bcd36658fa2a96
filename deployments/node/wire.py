"""What the gRPC servers of nodes and runners share: the gate, errors, the pace of `Watch`."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
import grpc.aio

from blocks.errors import InvalidRequest, SmiError
from tasks.protocol.auth import METADATA, Gate
from tasks.protocol.inference_pb2 import Error, Event, Header, Request

GAP_S = 0.05
PULSE_S = 1.0

log = logging.getLogger("smi.node")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guarded(grpc.GenericRpcHandler):
    """Service `smi.Inference` for callers who know the join token; all others are UNAUTHENTICATED."""

    def __init__(self, gate: Gate, methods: Mapping[str, Handler]) -> None:
        self._gate = gate
        self._methods = {f"/smi.Inference/{name}": handler for name, handler in methods.items()}
        self._denied: Handler = grpc.stream_stream_rpc_method_handler(_deny)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        for key, value in handler_call_details.invocation_metadata:
            if key == METADATA and isinstance(value, str) and self._gate.admits(value):
                return self._methods.get(handler_call_details.method)
        return self._denied


async def _deny(requests: AsyncIterator[bytes], context: Context) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, f"{METADATA} is missing, expired, or for another node or token"
    )


class Beats:
    """Wakes watchers: at once, on change (at most 20 times a second), and every second."""

    def __init__(self) -> None:
        self._news: set[asyncio.Event] = set()

    def changed(self) -> None:
        for news in self._news:
            news.set()

    async def beats(self) -> AsyncIterator[None]:
        news = asyncio.Event()
        self._news.add(news)
        try:
            while True:
                news.clear()
                yield
                await asyncio.sleep(GAP_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), PULSE_S - GAP_S)
        finally:
            self._news.discard(news)


def header_of(request: Request, whole: bool) -> Header:
    """The header that a call starts with.

    Raises:
        InvalidRequest: there is none, or it asks `Ask` (`whole`) for what only `Run` can do.
    """
    if not request.HasField("header"):
        raise InvalidRequest("a call starts with a header")
    if whole and (request.header.stream or request.header.media):
        raise InvalidRequest("`Ask` has one request and one answer; streams and media go by `Run`")
    return request.header


def error_event(error: SmiError) -> Event:
    return Event(
        error=Error(
            code=error.code,
            message=error.message,
            param=error.param or "",
            retry_after=error.retry_after or 0,
            detail=error.detail,
        )
    )


def unexpected(error: Exception, subject: str) -> SmiError:
    """A neutral error for the user; ours goes to the log, without its text, which may hold content."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: unexpected %s\n%s", subject, type(error).__name__, where)
    return SmiError("something went wrong on our side; the node's log has the details")


async def each(
    beats: Beats, state: Callable[[], Any], context: Context, first: Callable[[Any], None]
) -> None:
    """Serve one `Watch`: `state()` at each beat; `first` completes the first message."""
    begun = False
    async for _ in beats.beats():
        message = state()
        if not begun:
            first(message)
            begun = True
        await context.write(message)
