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
from typing import Any, TypeVar

import grpc
import grpc.aio
import psutil

from blocks.catalogue import Model
from blocks.errors import LoadFailed, NotAdmitted, SmiError, from_code
from deployments.node import runner as runner_process
from deployments.node.ledger import Ledger
from deployments.node.plugins import driver_class
from deployments.node.resident import Runner, same
from deployments.node.spawn import GONE_S, Child, Forkserver
from deployments.node.wire import unexpected
from tasks.protocol.auth import Caller
from tasks.protocol.inference_pb2 import (
    LOADING,
    READY,
    UNLOADING,
    DrainRequest,
    LoadRequest,
    UnloadRequest,
    WatchRequest,
)

PRELOAD = "deployments.node.preload"  # what runners share, and what drivers name
LIGHT = "deployments.node.runner"
UNLOAD_S = 8.0  # a runner that was asked to end is killed after this
KILLED_S = 1.0  # a node that stops waits no longer for runners that it has killed
FOLLOW_S = 0.5  # pause before a broken Watch of a runner is taken up again
POLL_S = 0.005
SOCKET_PATH_MAX = 100  # the kernel allows 107 bytes

log = logging.getLogger("smi.node")
T = TypeVar("T")


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
            if not runner.settled.is_set():
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

    def _task(self, runner: Runner, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        runner.tasks.add(task)
        task.add_done_callback(runner.tasks.discard)
        return task

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
        error = error or LoadFailed(f"the process of {model.name} ended as it became ready")
        log.warning("%s was not loaded: %s", model.name, error.message)
        try:
            await self._end(runner)
        except LoadFailed:
            return  # those who wait have been told
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
                with suppress(LoadFailed):  # its process does not end, and it is not idle any more
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
        runner.settled.set()
        if runner.gone.is_set():
            return
        runner.gone.set()
        self.ledger.release(runner.model.name)
        if self._runners.get(runner.model.name) is runner:
            del self._runners[runner.model.name]
        with suppress(OSError):
            os.unlink(runner.socket)
        self._task(runner, runner.channel.close())
        self._changed()

    async def _follow(self, runner: Runner) -> None:
        """Keep `runner.state`; anew after a broken Watch, since a runner that stalled may recover."""
        while not runner.gone.is_set():
            with suppress(grpc.aio.AioRpcError):
                async for state in runner.stub.Watch(WatchRequest(), metadata=self.metadata()):
                    news = state.runners[0]
                    changed = not same(news, runner.state)
                    runner.state = news
                    if changed:
                        self._changed()
            await asyncio.sleep(FOLLOW_S)

    async def _end(self, runner: Runner, grace_s: float = 0.0) -> None:
        """End the runner's process; its memory is free when this returns.

        Raises:
            LoadFailed: the process does not end. Its memory stays reserved until it does.
        """
        self._ending(runner)
        try:
            if runner.child is not None:
                await runner.child.end(grace_s)
        except TimeoutError:
            error = runner.held()
            log.error("%s", error.message)
            raise error from None
        self._forget(runner)

    def _ending(self, runner: Runner) -> None:
        runner.stage = UNLOADING
        runner.settled.clear()
        self._changed()

    async def unload(self, model: str, *, if_idle: bool) -> bool:
        """End the runner of `model`, if there is one; False if it works and `if_idle`.

        What has begun goes on when the caller leaves.

        Raises:
            LoadFailed: its process was killed and does not end.
        """
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
            try:
                await asyncio.wait_for(runner.gone.wait(), GONE_S)
            except TimeoutError:
                raise LoadFailed(f"the process of {model} was killed and does not end") from None
            return True
        self._ending(runner)
        return await asyncio.shield(self._task(runner, self._unload(runner, if_idle)))

    async def _unload(self, runner: Runner, if_idle: bool) -> bool:
        request = UnloadRequest(model=runner.model.name, if_idle=if_idle)
        try:
            if not runner.gone.is_set():
                await runner.stub.Unload(request, metadata=self.metadata(), timeout=UNLOAD_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION and not runner.gone.is_set():
                runner.stage = READY
                runner.settled.set()
                self._changed()
                return False
        except asyncio.CancelledError:
            if not runner.gone.is_set():
                raise
            # Not this task was cancelled but its call, when the dead runner's channel was closed.
        await self._end(runner, UNLOAD_S)
        log.info("%s is unloaded", runner.model.name)
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

    async def close(self, grace_s: float) -> None:
        """End every runner, whatever it does; what does not end within `grace_s` is killed."""
        self._closed = True
        await asyncio.gather(*(self._close(runner, grace_s) for runner in self.all()))
        self._forkserver.close()
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _close(self, runner: Runner, grace_s: float) -> None:
        if runner.child is None:
            for task in list(runner.tasks):
                task.cancel()
            return
        with suppress(TimeoutError, LoadFailed):
            if runner.stage == READY:
                await asyncio.wait_for(self.unload(runner.model.name, if_idle=False), grace_s)
        runner.child.kill()
        try:
            await asyncio.wait_for(runner.gone.wait(), KILLED_S)
        except TimeoutError:
            log.error("the process of %s was killed and does not end", runner.model.name)


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
