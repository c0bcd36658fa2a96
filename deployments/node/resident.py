"""What a node knows of one of its runners."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import grpc.aio

from blocks.catalogue import Model
from blocks.errors import LoadFailed
from deployments.node.spawn import Child
from tasks.protocol.client import ASK, CHANNEL_OPTIONS, RUN
from tasks.protocol.inference_pb2 import LOADING, READY, RunnerState, Stage
from tasks.protocol.inference_pb2_grpc import InferenceStub


class Runner:
    """The node's view of one runner.

    Attributes:
        loaded: done when the model is ready, or failed with what the user is told.
        settled: set unless it is being ended.
        claims: requests of this node that need it to stay.
        used: when it last worked for this node (`time.monotonic`).
        state: as it last described itself.
    """

    def __init__(self, model: Model, socket: str) -> None:
        self.model, self.socket = model, socket
        self.stage: Stage.ValueType = LOADING
        self.since = time.monotonic()
        self.loaded = _outcome()
        self.settled = asyncio.Event()
        self.settled.set()
        self.gone = asyncio.Event()
        self.claims = 0
        self.used = time.monotonic()
        self.state = RunnerState()
        self.child: Child | None = None
        self.channel = grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)
        self.stub = InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.ask: Any = self.channel.unary_unary(ASK)  # bytes in, bytes out
        self.run: Any = self.channel.stream_stream(RUN)
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def bound(self) -> bool:
        return os.path.exists(self.socket)

    @property
    def idle(self) -> bool:
        return self.stage == READY and not self.claims and not self.state.active and not self.state.queued

    @property
    def last_used(self) -> float:
        return max(self.used, time.monotonic() - self.state.idle_s if self.state.idle_s else self.used)

    def held(self) -> LoadFailed:
        """Its process was killed and does not end: tell whoever wants it, until it does."""
        error = LoadFailed(
            f"the process of {self.model.name} was killed, but the kernel still holds it and its memory"
        )
        if self.loaded.done():
            self.loaded = _outcome()
        self.loaded.set_exception(error)
        self.settled.set()
        return error

    def described(self) -> RunnerState:
        """For the node's state: what it says of itself, with the node's word on its stage."""
        state = RunnerState()
        state.CopyFrom(self.state)
        state.model, state.socket, state.stage = self.model.name, self.socket, self.stage
        state.memory, state.slots = int(self.model.memory), self.model.slots
        state.pid = self.child.pid if self.child is not None else 0
        return state


def _outcome() -> asyncio.Future[None]:
    """One whose error may go unheard: whoever asked may have left."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def same(one: RunnerState, other: RunnerState) -> bool:
    """Whether two states differ in nothing but the time that has passed."""
    idle_s, one.idle_s = one.idle_s, other.idle_s
    equal = one == other
    one.idle_s = idle_s
    return equal
