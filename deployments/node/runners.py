"""The runners of a node: loaded once however many ask, ended to make room, watched while they live."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from blocks.catalogue import Model
from blocks.errors import LoadFailed, NotAdmitted, SmiError, from_code
from deployments.node import runner as runner_process
from deployments.node.ledger import Ledger
from deployments.node.plugins import driver_class
from deployments.node.spawn import Child, Forkserver
from deployments.node.wire import unexpected
from tasks.protocol.auth import Caller
from tasks.protocol.client import ASK, CHANNEL_OPTIONS, RUN
from tasks.protocol.inference_pb2 import (
    LOADING,
    READY,
    UNLOADING,
    DrainRequest,
    LoadRequest,
    RunnerState,
    Stage,
    UnloadRequest,
    WatchRequest,
)
from tasks.protocol.inference_pb2_grpc import InferenceStub

PRELOAD = "deployments.node.preload"  # what runners share, and what drivers name
LIGHT = "deployments.node.runner"
UNLOAD_S = 8.0  # a runner that was asked to end is killed after this
POLL_S = 0.005
SOCKET_PATH_MAX = 100  # the kernel allows 107 bytes

log = logging.getLogger("smi.node")


class Runner:
    """The node's view of one runner.

    Attributes:
        loaded: done when the model is ready, or failed with what the user is told.
        settled: set unless it is being unloaded.
        claims: requests of this node that need it to stay.
        used: when it last worked for this node (`time.monotonic`).
        state: as it last described itself.
    """

    def __init__(self, model: Model, socket: str) -> None:
        self.model, self.socket = model, socket
        self.stage: Stage.ValueType = LOADING
        self.since = time.monotonic()
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loaded.add_done_callback(lambda loaded: loaded.cancelled() or loaded.exception())
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
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def bound(self) -> bool:
        return os.path.exists(self.socket)

    @property
    def idle(self) -> bool:
        return self.stage == READY and not self.claims and not self.state.active and not self.state.queued

    @property
    def last_used(self) -> float:
        return max(self.used, time.monotonic() - self.state.idle_s if self.state.idle_s else self.used)

    def described(self) -> RunnerState:
        """For the node's state: what it says of itself, with the node's word on its stage."""
        state = RunnerState()
        state.CopyFrom(self.state)
        state.model, state.socket, state.stage = self.model.name, self.socket, self.stage
        state.memory, state.slots = int(self.model.memory), self.model.slots
        state.pid = self.child.pid if self.child is not None else 0
        return state


class Runners:
    """Every runner of the node named `name`. `changed` is called when one of them changes."""

    def __init__(
        self,
        *,
        name: str,
        token: str,
        folder: Path,
        ledger: Ledger,
        changed: Callable[[], None],
        preload: bool = True,
    ) -> None:
        self._name, self._token, self._changed = name, token, changed
        self._folder = _socket_folder(folder)
        self._own_folder = self._folder != folder
        self._numbers = itertools.count(1)
        self._caller = Caller(token)
        self._runners: dict[str, Runner] = {}
        self._room = asyncio.Lock()
        self._forkserver = Forkserver(PRELOAD if preload else LIGHT)
        self._closed = False
        self.ledger = ledger

    def start(self) -> None:
        """Begin the imports that all runners share, in the background."""
        self._forkserver.warm_up()

    def metadata(self) -> grpc.aio.Metadata:
        return self._caller.metadata(self._name)

    def all(self) -> list[Runner]:
        return list(self._runners.values())

    def get(self, model: str) -> Runner | None:
        return self._runners.get(model)

    async def claim(self, model: Model) -> Runner:
        """The ready runner of `model`, loaded if need be; it stays until `release`.

        Raises:
            OutOfMemory, LoadFailed: the same for all who waited for one load.
        """
        while True:
            runner = self._runners.get(model.name) or self._begin(model)
            if runner.stage == UNLOADING:
                await runner.settled.wait()
                continue
            runner.claims += 1
            try:
                if not runner.loaded.done():
                    await asyncio.shield(runner.loaded)
                runner.loaded.result()
            except BaseException:
                runner.claims -= 1
                raise
            return runner

    def release(self, runner: Runner) -> None:
        """The request that claimed `runner` has ended."""
        runner.claims -= 1
        runner.used = time.monotonic()
        self._changed()

    def _begin(self, model: Model) -> Runner:
        if self._closed:
            raise NotAdmitted(f"node {self._name} is leaving", retry_after=1)
        socket = self._folder / f"{os.getpid()}-{next(self._numbers)}.sock"
        runner = self._runners[model.name] = Runner(model, str(socket))
        self._task(runner, self._bring_up(runner))
        self._changed()
        return runner

    def _task(self, runner: Runner, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        runner.tasks.add(task)
        task.add_done_callback(runner.tasks.discard)

    async def _bring_up(self, runner: Runner) -> None:
        model, error = runner.model, None
        try:
            await self._make_room(model)
            await self._launch(runner)
        except SmiError as told:
            error = told
        except Exception as raised:  # noqa: BLE001 (those who wait must be told)
            error = unexpected(raised, f"load of {model.name}")
        if error is None and not runner.gone.is_set():
            runner.stage, runner.used = READY, time.monotonic()
            runner.loaded.set_result(None)
            log.info("%s is ready after %.1f s", model.name, time.monotonic() - runner.since)
            self._changed()
            return
        await self._end(runner)
        error = error or LoadFailed(f"the process of {model.name} ended as it became ready")
        log.warning("%s was not loaded: %s", model.name, error.message)
        runner.loaded.set_exception(error)

    async def _make_room(self, model: Model) -> None:
        """Reserve `model`'s memory, ending idle models if need be; in order of arrival."""
        size, refused = int(model.memory), set[str]()
        async with self._room:
            while not self.ledger.reserve(model.name, size):
                idle = sorted(
                    (runner for runner in self.all() if runner.idle and runner.model.name not in refused),
                    key=lambda runner: runner.last_used,
                )
                victims = self.ledger.victims(model.name, size, [runner.model.name for runner in idle])
                if not await self.unload(victims[0], if_idle=True):
                    refused.add(victims[0])

    async def _launch(self, runner: Runner) -> None:
        model = runner.model
        heavy = bool(driver_class(model.driver).preload)
        if heavy:
            await self._forkserver.warm()
        arguments = (model.model_dump_json(), runner.socket, self._name, self._token)
        try:
            async with asyncio.timeout(model.load_timeout_s):
                runner.child = await self._forkserver.start(runner_process.main, *arguments, heavy=heavy)
                self._task(runner, self._mourn(runner, runner.child))
                while not runner.bound and not runner.child.ended.is_set():  # noqa: ASYNC110 (a file tells nobody)
                    await asyncio.sleep(POLL_S)
                await self._load(runner)
        except TimeoutError:
            raise LoadFailed(
                f"{model.name} did not load within {model.load_timeout_s:g} s; its `load_timeout_s` says so"
            ) from None
        except grpc.aio.AioRpcError as error:
            log.debug("load of %s: %s", model.name, error)
            raise LoadFailed(f"the process of {model.name} ended while it loaded") from error
        self._task(runner, self._follow(runner))

    async def _load(self, runner: Runner) -> None:
        if runner.child is not None and runner.child.ended.is_set():
            raise LoadFailed(f"the process of {runner.model.name} ended at its start")
        async for event in runner.stub.Load(LoadRequest(model=runner.model.name), metadata=self.metadata()):
            if event.HasField("error"):
                raise from_code(event.error.code, event.error.message)

    async def _mourn(self, runner: Runner, child: Child) -> None:
        await child.ended.wait()
        if runner.stage == READY:
            log.warning("the process of %s ended unasked (exit code %s)", runner.model.name, child.exitcode)
        self._forget(runner)

    def _forget(self, runner: Runner) -> None:
        if runner.gone.is_set():
            return
        runner.gone.set()
        runner.settled.set()
        self.ledger.release(runner.model.name)
        if self._runners.get(runner.model.name) is runner:
            del self._runners[runner.model.name]
        with suppress(OSError):
            os.unlink(runner.socket)
        self._task(runner, runner.channel.close())
        self._changed()

    async def _follow(self, runner: Runner) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for state in runner.stub.Watch(WatchRequest(), metadata=self.metadata()):
                news = state.runners[0]
                changed = not same(news, runner.state)
                runner.state = news
                if changed:
                    self._changed()

    async def _end(self, runner: Runner, grace_s: float = 0.0) -> None:
        """End the runner's process; its memory is free when this returns."""
        runner.stage = UNLOADING
        runner.settled.clear()
        self._changed()
        if runner.child is not None:
            await runner.child.end(grace_s)
        self._forget(runner)

    async def unload(self, model: str, *, if_idle: bool) -> bool:
        """End the runner of `model`, if there is one; False if it works and `if_idle`."""
        runner = self._runners.get(model)
        if runner is None:
            return True
        if if_idle and not runner.idle:
            return False
        while runner.stage == LOADING and runner.child is None:  # noqa: ASYNC110 (its process is being made)
            await asyncio.sleep(POLL_S)
        if runner.stage != READY:
            if runner.child is not None:
                runner.child.kill()  # whoever loads or unloads it sees to the rest
            await runner.gone.wait()
            return True
        runner.stage = UNLOADING
        runner.settled.clear()
        self._changed()
        try:
            await runner.stub.Unload(
                UnloadRequest(model=model, if_idle=if_idle), metadata=self.metadata(), timeout=UNLOAD_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION and not runner.gone.is_set():
                runner.stage = READY
                runner.settled.set()
                self._changed()
                return False
        await self._end(runner, UNLOAD_S)
        log.info("%s is unloaded", model)
        return True

    async def drain(self, deadline_s: float) -> bool:
        """Let what came to runners directly end; whether it has within `deadline_s`."""
        request = DrainRequest(deadline_s=deadline_s)
        calls = [
            runner.stub.Drain(request, metadata=self.metadata(), timeout=deadline_s + 1)
            for runner in self.all()
            if runner.stage == READY
        ]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        return not any(isinstance(end, grpc.aio.AioRpcError) for end in ends)

    async def close(self) -> None:
        """End every runner, whatever it does."""
        self._closed = True
        await asyncio.gather(*(self._close(runner) for runner in self.all()))
        self._forkserver.close()
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _close(self, runner: Runner) -> None:
        if runner.stage == READY:
            await self.unload(runner.model.name, if_idle=False)
        elif runner.child is not None:
            await runner.child.end()
        else:
            for task in list(runner.tasks):
                task.cancel()


def same(one: RunnerState, other: RunnerState) -> bool:
    """Whether two states differ in nothing but the time that has passed."""
    idle_s, one.idle_s = one.idle_s, other.idle_s
    equal = one == other
    one.idle_s = idle_s
    return equal


def _socket_folder(folder: Path) -> Path:
    """`folder`, private and swept of dead nodes' sockets; a private one elsewhere if its path is too long."""
    if len(os.fsencode(folder)) + len("/4194304-99999.sock~") > SOCKET_PATH_MAX:
        return Path(tempfile.mkdtemp(prefix="smi-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for socket in folder.glob("*-*.sock*"):
        owner = socket.name.partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            socket.unlink(missing_ok=True)
    return folder
