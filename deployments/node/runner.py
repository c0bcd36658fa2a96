"""A runner: the process of one loaded model, a small gRPC server on a Unix socket.

It speaks the same service as a node, so that on one machine a request may come to it directly.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

from blocks.catalogue import Model
from blocks.errors import DeadlineExceeded, NotAdmitted, NotFound, SmiError
from deployments.listen import SERVER_OPTIONS
from deployments.node.adapters.base import Adapter
from deployments.node.admission import Admission
from deployments.node.drivers.base import Driver
from deployments.node.plugins import adapter_class, driver_class
from deployments.node.wire import (
    Beats,
    Context,
    Guarded,
    each,
    error_event,
    header_of,
    unexpected,
)
from tasks.protocol.auth import Gate, node_proof
from tasks.protocol.inference_pb2 import (
    LOADING,
    READY,
    UNLOADING,
    Done,
    DrainReply,
    DrainRequest,
    Event,
    Header,
    LoadRequest,
    NodeState,
    Progress,
    Request,
    RunnerState,
    Stage,
    UnloadReply,
    UnloadRequest,
    WatchRequest,
)
from tasks.protocol.machine import machine_id

LINGER_S = 0.15  # what is on its way to a runner that ends is still told so, and goes elsewhere
UNLOAD_S = 5.0  # a driver's own unload may take so long
log = logging.getLogger("smi.runner")


def main(model_json: str, socket: str, node: str, token: str) -> None:
    """The child process: serve `model_json` at `socket` for the node named `node`, until told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the node ends us
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_end_with_node, name="node-watch", daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.WARNING)
    logging.getLogger("smi").setLevel(logging.INFO)  # others log each request
    uvloop.run(Runner(Model.model_validate_json(model_json), socket, node, token).serve())
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # gives back named semaphores
    # A driver's thread that does not end must not hold the model's memory.
    os._exit(0)


def _end_with_node() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


class Runner:
    """The service of one model."""

    def __init__(self, model: Model, socket: str, node: str, token: str) -> None:
        self.model = model
        self._socket, self._node, self._token = socket, node, token
        self._beats = Beats()
        self._admission = Admission(model.slots, model.queue, self._beats.changed)
        self._stage: Stage.ValueType = LOADING
        self._driver: Driver | None = None
        self._adapter: Adapter[Any, Any] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def serve(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((Guarded(Gate(self._token, self._node), self._methods()),))
        server.add_insecure_port(f"unix:{self._socket}~")
        await server.start()
        os.rename(f"{self._socket}~", self._socket)  # there once it can be called, and not before
        await self._over.wait()
        await asyncio.sleep(LINGER_S)
        if self._driver is not None:
            unloading = asyncio.to_thread(self._driver.unload)
            try:
                await asyncio.wait_for(unloading, UNLOAD_S)
            except Exception as error:  # noqa: BLE001 (it ends in any case)
                unexpected(error, f"unload of {self.model.name}")
        await server.stop(0.05)  # lets the reply to `Unload` out

    def _methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return {
            "Run": grpc.stream_stream_rpc_method_handler(
                self.run,
                Request.FromString,
                Event.SerializeToString,
            ),
            "Ask": unary(self.ask, Request.FromString, Event.SerializeToString),
            "Watch": stream(self.watch, WatchRequest.FromString, NodeState.SerializeToString),
            "Load": stream(self.load, LoadRequest.FromString, Event.SerializeToString),
            "Unload": unary(self.unload, UnloadRequest.FromString, UnloadReply.SerializeToString),
            "Drain": unary(self.drain, DrainRequest.FromString, DrainReply.SerializeToString),
        }

    async def run(self, requests: AsyncIterator[Request], context: Context) -> None:
        """`Run`: one request."""
        first = await context.read()
        await context.write(await self._answer(Request() if first is grpc.aio.EOF else first, context))

    async def ask(self, request: Request, context: Context) -> Event:
        """`Ask`: one request without media, answered whole."""
        return await self._answer(request, context, whole=True)

    async def _answer(self, first: Request, context: Context, whole: bool = False) -> Event:
        try:
            return Event(done=await self._done(header_of(first, whole), context))
        except SmiError as error:
            return error_event(error)
        except Exception as error:  # noqa: BLE001 (the boundary: a bug must reach the client as an event)
            return error_event(unexpected(error, f"request to {self.model.name}"))

    async def _done(self, header: Header, context: Context) -> Done:
        if not header.deadline_s:
            return await self._admitted(header, context)
        try:
            async with asyncio.timeout(header.deadline_s) as deadline:
                return await self._admitted(header, context)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"no whole answer within {header.deadline_s:g} s") from None

    async def _admitted(self, header: Header, context: Context) -> Done:
        if header.model != self.model.name or header.task != self.model.task:
            raise NotFound(f"{self.model.name} ({self.model.task}) runs here, nothing else", param="model")
        adapter, admission = self._adapter, self._admission
        if adapter is None:
            raise NotAdmitted(f"{self.model.name} is still loading", retry_after=1)
        parameters = adapter.parse(header.parameters)
        if not admission.enter():
            if header.stream:
                await context.write(Event(progress=Progress(stage="queued")))
            await admission.wait(header.priority, header.deadline_s)
        started = time.monotonic()
        try:
            return await adapter.run(parameters, _media(context), context.write if header.stream else None)
        finally:
            admission.leave(time.monotonic() - started)

    async def watch(self, request: WatchRequest, context: Context) -> None:
        """`Watch`: this runner's state."""

        def prove(state: NodeState) -> None:
            state.proof = node_proof(self._token, self._node, request.nonce)

        await each(self._beats, self._state, context, prove)

    def _state(self) -> NodeState:
        admission = self._admission
        state = RunnerState(
            model=self.model.name,
            socket=self._socket,
            stage=UNLOADING if admission.closed else self._stage,
            memory=int(self.model.memory),
            slots=admission.slots,
            active=admission.active,
            queued=admission.queued,
            idle_s=admission.idle_s,
            counters=dict(self._driver.counters) if self._driver is not None else {},
            pid=os.getpid(),
        )
        return NodeState(name=self._node, machine=machine_id(), draining=admission.closed, runners=[state])

    async def load(self, request: LoadRequest, context: Context) -> None:
        """`Load`: bring the model into memory, once however often it is asked."""
        if request.model != self.model.name:
            await context.write(error_event(NotFound(f"{self.model.name} runs here, nothing else")))
            return
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        try:
            await asyncio.shield(self._loading)
        except SmiError as error:
            event = error_event(error)
        except MemoryError:
            event = error_event(
                SmiError(f"{self.model.name} found too little memory while loading; correct its `memory`")
            )
        except Exception as error:  # noqa: BLE001 (the boundary)
            event = error_event(unexpected(error, f"load of {self.model.name}"))
        else:
            event = Event(done=Done())
        await context.write(event)

    async def _load(self) -> None:
        driver = driver_class(self.model.driver)(self.model)
        self._driver = driver
        await asyncio.to_thread(driver.load)
        self._adapter = adapter_class(self.model.task)(driver)
        self._stage = READY
        self._beats.changed()

    async def unload(self, request: UnloadRequest, context: Context) -> UnloadReply:
        """`Unload`: end this process; with `if_idle` only if nothing is being worked on."""
        if request.if_idle and not self._admission.close_if_idle():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{self.model.name} is working")
        self._admission.closed = True
        self._beats.changed()
        asyncio.get_running_loop().call_soon(self._over.set)
        return UnloadReply()

    async def drain(self, request: DrainRequest, context: Context) -> DrainReply:
        """`Drain`: take nothing new, return when the last request has ended."""
        drained = asyncio.create_task(self._admission.drain(request.deadline_s))
        self._beats.changed()
        if not await drained:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{self.model.name} is still working")
        return DrainReply()


async def _media(context: Context) -> AsyncIterator[bytes]:
    while (request := await context.read()) is not grpc.aio.EOF:
        yield request.media
