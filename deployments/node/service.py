"""The node's gRPC service: what comes for a model is passed on, as bytes, to the model's runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import grpc
import grpc.aio

from blocks.catalogue import Catalogue, Model
from blocks.errors import LoadFailed, NotAdmitted, NotFound, RunnerDied, SmiError, Unavailable
from deployments.node.resident import Runner
from deployments.node.runners import Runners
from deployments.node.wire import Beats, Context, each, error_event, header_of, unexpected
from tasks.protocol.auth import node_proof
from tasks.protocol.client import too_large
from tasks.protocol.inference_pb2 import (
    Done,
    DrainReply,
    DrainRequest,
    Event,
    Header,
    LoadRequest,
    NodeState,
    Progress,
    Request,
    UnloadReply,
    UnloadRequest,
    WatchRequest,
)
from tasks.protocol.machine import machine_id

PROGRESS_S = 1.0
MARGIN = 0.95  # a request that waits for a load is answered just before its client gives up
DEATH_S = 2.0  # a runner whose connection broke is seen to have ended within this


class Node:
    """The service of a node. `runners` does the work; `draining` refuses what is new."""

    def __init__(
        self, *, name: str, pool: str, token: str, catalogue: Catalogue, runners: Runners, beats: Beats
    ) -> None:
        self.name, self.pool = name, pool
        self.draining = False
        self._active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._token, self._catalogue = token, catalogue
        self._runners, self._beats = runners, beats
        self._machine = machine_id()

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return {
            "Run": grpc.stream_stream_rpc_method_handler(self.run),
            "Ask": unary(self.ask),
            "Watch": stream(self.watch, WatchRequest.FromString, NodeState.SerializeToString),
            "Load": stream(self.load, LoadRequest.FromString, Event.SerializeToString),
            "Unload": unary(self.unload, UnloadRequest.FromString, UnloadReply.SerializeToString),
            "Drain": unary(self.drain, DrainRequest.FromString, DrainReply.SerializeToString),
        }

    async def run(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """`Run`: one request, by the runner of its model."""
        last = await self._answer(await context.read(), context)
        if last is not None:
            await context.write(last)

    async def ask(self, first: bytes, context: Context) -> bytes | None:
        """`Ask`: one request without media, answered whole."""
        return await self._answer(first, context, whole=True)

    async def _answer(self, first: Any, context: Context, whole: bool = False) -> bytes | None:
        """The only or last event; None when events have been passed on, the last one too."""
        self._active += 1
        self._quiet.clear()
        try:
            return await self._by_runner(header_of(_request(first), whole), first, context)
        except SmiError as error:
            return error_event(error).SerializeToString()
        except Exception as error:  # noqa: BLE001 (the boundary: a bug must reach the client as an event)
            return error_event(unexpected(error, "request")).SerializeToString()
        finally:
            self._active -= 1
            if not self._active:
                self._quiet.set()

    async def _by_runner(self, header: Header, first: bytes, context: Context) -> bytes | None:
        model = self._model(header.model, header.task)
        runner = self._runners.get(model.name)
        if runner is None or not runner.loaded.done():
            started = time.monotonic()
            runner = await self._loaded(model, header, context)
            if header.deadline_s:
                header.deadline_s = max(0.001, header.deadline_s - (time.monotonic() - started))
                first = Request(header=header).SerializeToString()
        else:
            runner = await self._runners.claim(model)
        try:
            if header.stream or header.media:
                await self._pass_on(first, header, runner, context)
                return None
            answer: bytes = await runner.ask(first, metadata=self._runners.metadata())
            return answer
        except grpc.aio.AioRpcError as error:
            raise await self._told(error, runner) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled but its call, when a dead runner's channel was closed.
            raise _died() from None
        finally:
            self._runners.release(runner)

    def _model(self, name: str, task: str | None = None) -> Model:
        if self.draining:
            raise NotAdmitted(f"node {self.name} is leaving", retry_after=1)
        return self._catalogue.get(name, task)

    async def _loaded(self, model: Model, header: Header, context: Context) -> Runner:
        """Claim a runner that has to be loaded first, within the request's own deadline."""

        async def send(event: Event) -> None:
            await context.write(event.SerializeToString())

        try:
            async with (
                _telling(model.name, send) if header.stream else nullcontext(),
                asyncio.timeout(header.deadline_s * MARGIN or None) as deadline,
            ):
                return await self._runners.claim(model)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Unavailable(f"{model.name} is still loading; try again", retry_after=5) from None

    async def _pass_on(self, first: bytes, header: Header, runner: Runner, context: Context) -> None:
        call: Any = runner.run(metadata=self._runners.metadata())
        pump: asyncio.Task[None] | None = None
        try:
            await call.write(first)
            if header.media:
                pump = asyncio.create_task(_pump(context, call))
            else:
                await call.done_writing()
            while (event := await call.read()) is not grpc.aio.EOF:
                await context.write(event)
        finally:
            call.cancel()
            if pump is not None:
                pump.cancel()
                await asyncio.wait([pump])

    async def _told(self, error: grpc.aio.AioRpcError, runner: Runner) -> SmiError:
        """What a broken call to a runner means; told once it is gone, so that the next one loads anew."""
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            with suppress(TimeoutError):
                await asyncio.wait_for(runner.gone.wait(), DEATH_S)
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return too_large("the answer")
        return _died()

    async def watch(self, request: WatchRequest, context: Context) -> None:
        """`Watch`: this node's state; the first message proves that it knows the join token."""

        def prove(state: NodeState) -> None:
            state.proof = node_proof(self._token, self.name, request.nonce)

        await each(self._beats, self.state, context, prove)

    def state(self) -> NodeState:
        ledger = self._runners.ledger
        return NodeState(
            name=self.name,
            pool=self.pool,
            machine=self._machine,
            memory_total=ledger.total,
            memory_reserved=ledger.reserved,
            draining=self.draining,
            runners=[runner.described() for runner in self._runners.all()],
        )

    async def load(self, request: LoadRequest, context: Context) -> None:
        """`Load`: have a model ready; progress every second until it is."""
        try:
            async with _telling(request.model, context.write):
                self._runners.release(await self._runners.claim(self._model(request.model)))
            event = Event(done=Done())
        except SmiError as error:
            event = error_event(error)
        await context.write(event)

    async def unload(self, request: UnloadRequest, context: Context) -> UnloadReply:
        """`Unload`: returns when the model's memory is free; OK as well if it was not loaded."""
        try:
            model = self._catalogue.get(request.model)
        except NotFound as error:
            await context.abort(grpc.StatusCode[error.grpc_status], error.message)
        try:
            unloaded = await self._runners.unload(model.name, if_idle=request.if_idle)
        except LoadFailed as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, error.message)
        if not unloaded:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{model.name} is working")
        return UnloadReply()

    async def drain(self, request: DrainRequest, context: Context) -> DrainReply:
        """`Drain`: take nothing new; returns when all has ended."""
        if not await self.drained(request.deadline_s):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "requests are still being worked on")
        return DrainReply()

    async def drained(self, deadline_s: float) -> bool:
        """Take nothing new; whether all that was taken has ended within the deadline."""
        self.draining = True
        self._beats.changed()
        try:
            async with asyncio.timeout(deadline_s):
                await self._quiet.wait()
                return await self._runners.drain(deadline_s)
        except TimeoutError:
            return False


def _died() -> RunnerDied:
    return RunnerDied("the model's process ended while it worked on this request; try again")


def _request(first: Any) -> Request:
    return Request() if first is grpc.aio.EOF else Request.FromString(first)


@asynccontextmanager
async def _telling(model: str, send: Callable[[Event], Awaitable[None]]) -> AsyncIterator[None]:
    """Progress at once and every second while the block lasts."""
    over = asyncio.Event()

    async def tell() -> None:
        started = time.monotonic()
        while not over.is_set():
            detail = f"{model}, {time.monotonic() - started:.0f} s"
            await send(Event(progress=Progress(stage="loading", detail=detail)))
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), PROGRESS_S)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        over.set()
        # Never cancelled: a write that is under way would meet the next one.
        await asyncio.gather(task, return_exceptions=True)


async def _pump(context: Context, call: Any) -> None:
    """The client's chunks to the runner; each write waits until there is room for it."""
    # Whoever reads the runner's events learns why its call has ended.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (chunk := await context.read()) is not grpc.aio.EOF:
            await call.write(chunk)
        await call.done_writing()
