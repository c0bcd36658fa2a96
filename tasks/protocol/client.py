"""Calls to nodes and runners, with their failures told as `blocks.errors`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from blocks.errors import (
    ConfigurationError,
    DeadlineExceeded,
    NotAdmitted,
    PayloadTooLarge,
    RunnerDied,
    SmiError,
    from_code,
)
from tasks.protocol.auth import Caller
from tasks.protocol.inference_pb2 import Done, Event, Header, Request
from tasks.protocol.inference_pb2_grpc import InferenceStub

MAX_MESSAGE = 64 * 1024 * 1024  # bytes
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # a half-open peer is noticed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
RUN, ASK = "/smi.Inference/Run", "/smi.Inference/Ask"

CLOSE_S = 5.0
CONNECT_S = 5.0
BROKEN = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)

OnEvent = Callable[[Event], Awaitable[None]]


class Client:
    """Channels to nodes, kept open. `target` is a gRPC target; `audience` the node's name (host:port)."""

    def __init__(self, join_token: str) -> None:
        self._caller = Caller(join_token)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: dict[tuple[str, str], Any] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return self._channels[target]

    def stub(self, target: str) -> InferenceStub:
        return InferenceStub(self.channel(target))  # type: ignore[no-untyped-call]

    def _call(self, target: str, method: str, kind: str) -> Any:
        """`method` as a call of `kind`; one request makes a `unary_...` call of a streamed method, too."""
        if (target, kind) not in self._calls:
            self._calls[target, kind] = getattr(self.channel(target), kind)(
                method, request_serializer=Request.SerializeToString, response_deserializer=Event.FromString
            )
        return self._calls[target, kind]

    async def _connect(self, target: str, audience: str) -> None:
        """Have a connection first: a call that breaks on one may have been worked on, and is not tried again.

        Raises:
            NotAdmitted: none comes about.
        """
        channel = self.channel(target)
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        with suppress(TimeoutError, grpc.aio.UsageError):  # closed by another request that found it broken
            async with asyncio.timeout(CONNECT_S):
                while state not in BROKEN:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
                    if state is grpc.ChannelConnectivity.READY:
                        return
        if target.startswith("unix:"):
            self.forget(target)
        raise NotAdmitted(f"node {audience} cannot be reached")

    def forget(self, target: str) -> None:
        """Close the channel to `target`, which is gone."""
        channel = self._channels.pop(target, None)
        for call in [call for call in self._calls if call[0] == target]:
            del self._calls[call]
        if channel is not None:
            # With grace: calls that are still out end by themselves, as broken and not as cancelled.
            closing = asyncio.create_task(channel.close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def metadata(self, audience: str) -> grpc.aio.Metadata:
        return self._caller.metadata(audience)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        self._calls.clear()
        await asyncio.gather(*(channel.close() for channel in channels.values()), *self._closing)

    async def run(
        self,
        target: str,
        audience: str,
        header: Header,
        media: AsyncIterator[bytes] | None = None,
        on_event: OnEvent | None = None,
    ) -> Done:
        """Run one request; deltas and progress go to `on_event`, in order.

        Raises:
            NotAdmitted: before anything was done; another node may be tried.
            RunnerDied: the connection broke after that.
            SmiError: what the node answered, or what reading `media` raised.
        """
        await self._connect(target, audience)
        metadata = self.metadata(audience)
        timeout = header.deadline_s or None
        events: Any = None
        sent = _Requests(header, media)
        try:
            if media is not None:
                events = self._call(target, RUN, "stream_stream")(
                    aiter(sent), metadata=metadata, timeout=timeout
                )
            elif header.stream:
                events = self._call(target, RUN, "unary_stream")(
                    Request(header=header), metadata=metadata, timeout=timeout
                )
            else:
                ask = self._call(target, ASK, "unary_unary")
                return _done(await ask(Request(header=header), metadata=metadata, timeout=timeout))
            async for event in events:
                kind = event.WhichOneof("event")
                if kind in ("done", "error"):
                    return _done(event)
                if on_event is not None:
                    await on_event(event)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE and target.startswith("unix:"):
                self.forget(target)
            raise sent.failure or _told(error, audience) from error
        except BaseException as error:
            # We are cancelled, or fail, perhaps while handing an event on: then gRPC would never know.
            if events is not None:
                events.cancel()
            if sent.failure is not None and isinstance(error, asyncio.CancelledError) and not _cancelled():
                raise sent.failure from None
            raise
        raise RunnerDied(f"node {audience} ended the answer without saying that it is whole")


class _Requests:
    """A header and its media as requests. Where reading media fails, gRPC cancels the call and says no more:
    `failure` is what it was."""

    def __init__(self, header: Header, media: AsyncIterator[bytes] | None) -> None:
        self._header, self._media = header, media
        self.failure: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[Request]:
        yield Request(header=self._header)
        if self._media is None:
            return
        try:
            async for chunk in self._media:
                yield Request(media=chunk)
        except Exception as error:
            self.failure = error
            raise


def _cancelled() -> bool:
    """Whether somebody has cancelled us, rather than gRPC its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _done(event: Event) -> Done:
    if event.WhichOneof("event") == "error":
        error = event.error
        raise from_code(
            error.code,
            error.message,
            param=error.param or None,
            retry_after=error.retry_after or None,
            detail=error.detail,
        )
    return event.done


def too_large(what: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is larger than the {MAX_MESSAGE >> 20} MiB that go at once; ask for less")


def _told(error: grpc.aio.AioRpcError, audience: str) -> SmiError:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"node {audience} did not answer within the request's deadline")
        case grpc.StatusCode.UNAUTHENTICATED:
            return ConfigurationError(f"node {audience} does not know our join token (SMI_JOIN_TOKEN)")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.INTERNAL:
            return RunnerDied("the model's process ended while it worked on this request; try again")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return too_large("the answer")
        case code:
            return SmiError(f"node {audience} answered with gRPC status {code.name}")
