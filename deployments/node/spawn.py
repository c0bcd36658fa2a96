"""Processes of runners: forked from a server with the heavy imports done, and seen to have really ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.forkserver import _forkserver
from typing import Any

import psutil

GONE_S = 10.0  # a killed process is gone within this, or the kernel holds it


class Child:
    """A running child process. `ended` is set once the process, and so its memory, is really gone."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self.ended = asyncio.Event()
        self._process = process
        self.pid = int(process.pid or 0)
        try:
            self._seen: psutil.Process | None = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            self._seen = None
        self._loop = asyncio.get_running_loop()
        self._verifying: asyncio.Task[None] | None = None
        self._loop.add_reader(process.sentinel, self._signalled)

    def _signalled(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._verifying = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        # The sentinel also fires when the forkserver dies: then the child is alive, and nobody's.
        while self._alive():
            self.kill()
            await asyncio.sleep(0.01)
        self._process.join(0)  # reaps it, if it was ours and not the forkserver's
        self.ended.set()

    def _alive(self) -> bool:
        try:
            return (
                self._seen is not None
                and self._seen.is_running()
                and self._seen.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        try:
            if self._seen is not None:
                self._seen.kill()
        except psutil.NoSuchProcess:
            pass

    async def end(self, grace_s: float = 0.0) -> None:
        """Wait `grace_s` for the process to end by itself, then kill it; returns when it is gone."""
        try:
            await asyncio.wait_for(self.ended.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await asyncio.wait_for(self.ended.wait(), GONE_S)

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode


class Forkserver:
    """Starts children from a forkserver that has imported the module `preload`."""

    def __init__(self, preload: str) -> None:
        _hide_main()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        self._fresh = multiprocessing.get_context("spawn")
        # A start blocks until the server has imported its modules, and must not block the loop.
        self._thread = ThreadPoolExecutor(1, "forkserver")
        self._fresh_thread = ThreadPoolExecutor(1, "spawn")
        self._warm: asyncio.Future[Any] | None = None

    def warm_up(self) -> None:
        """Begin the server's imports in the background."""
        nothing = self._context.Process(target=_nothing)
        self._warm = asyncio.get_running_loop().run_in_executor(self._thread, nothing.start)
        self._warm.add_done_callback(self._warmed)

    def _warmed(self, warm: asyncio.Future[Any]) -> None:
        if warm.cancelled() or warm.exception() is not None:
            self._warm = None  # killed, or ended: whoever needs it next begins anew

    async def warm(self) -> None:
        """Wait for the server's imports."""
        if self._warm is None:
            self.warm_up()
        if self._warm is not None:
            await asyncio.shield(self._warm)

    async def start(self, target: Callable[..., None], *args: Any, heavy: bool) -> Child:
        """Run `target(*args)` in a new child process.

        One that is not `heavy` does not wait for the server's imports: until then it is a fresh process.
        """
        process: multiprocessing.process.BaseProcess
        if heavy or (self._warm is not None and self._warm.done()):
            await self.warm()
            process, thread = self._context.Process(target=target, args=args), self._thread
        else:
            process, thread = self._fresh.Process(target=target, args=args), self._fresh_thread
        await asyncio.get_running_loop().run_in_executor(thread, process.start)
        return Child(process)

    def close(self) -> None:
        """End the server, also in the midst of its imports."""
        pid = getattr(_forkserver, "_forkserver_pid", None)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for thread in (self._thread, self._fresh_thread):
            thread.shutdown(wait=False, cancel_futures=True)


def _nothing() -> None:
    """What the first child does: it is there to say that the server's imports are done."""


def _hide_main() -> None:
    """Children import their parent's `__main__`; ours is a command line that no runner needs."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    main.__dict__.pop("__file__", None)
