"""`smi up`, `smi down` and `smi status`: one installation on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocks.errors import ConfigurationError, SmiError
from blocks.settings import Settings, load_settings
from deployments.up import banner, home, postgres, prefect_server, processes
from deployments.up.processes import Recorded, State
from deployments.up.supervise import Say, Service, StartFailed, Supervisor, open_log

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S = {  # for each to stop in order; what is inside must need less
    "api": 8,  # answers go on for 3 s, then the record is written for 3 s
    "jobs": 4,
    "vectors": 6,  # calls end within 2 s, then Milvus Lite closes its files
    "node": 8,  # it lets go of what it works on, its worker and its runners: 7 s
    "prefect": 8,
    "postgres": 8,  # it writes all to disk
}
DOWN_S = sum(STOP_S.values()) + 10  # with what they leave behind
VECTORS_NICE = 10  # live requests outrank searches
BEGIN_S = 10  # a `smi up` that begins says who it is within this
CLI = [sys.executable, "-P", "-m", "deployments"]


@dataclass(frozen=True)
class Wishes:
    """What the command line asked of `up`. Ports of None: as before, or the default."""

    home: Path
    ports: dict[str, int | None]
    new_key: bool = False
    as_json: bool = False


def up(wishes: Wishes, say: Say, out: Say) -> None:
    """Start everything, tell where it is, and keep it running until told to stop.

    Raises:
        ConfigurationError: already running, a port is taken, the home folder cannot be used.
        StartFailed: a child did not start; everything is stopped again.
    """
    home.prepare(wishes.home)
    with processes.only_one(wishes.home):
        say = _also_logged(say, wishes.home / "logs" / "up.log")
        for left in processes.stop_leftovers(wishes.home):
            say(f"{left.name} (pid {left.pid}) was left by an earlier `smi up`; stopped")
        settings = home.settled(wishes.home, wishes.ports)
        asyncio.run(_Up(settings, wishes, say, out).run())


def _also_logged(say: Say, log: Path) -> Say:
    def both(text: str) -> None:
        with contextlib.suppress(OSError), open_log(log) as file:  # the disk may be full
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(text)

    return both


class _Up:
    def __init__(self, settings: Settings, wishes: Wishes, say: Say, out: Say) -> None:
        self.settings, self.wishes, self.out = settings, wishes, out
        self.environment = home.environment(settings)
        self.supervisor = Supervisor(settings.home, say)
        self.told_to_stop, self.hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self._listen_to_signals()
        self.supervisor.state.up = Recorded.of("up", os.getpid())
        self.supervisor.state.write(self.settings.home)
        stop = asyncio.create_task(self.told_to_stop.wait())
        start = asyncio.create_task(self._start())
        try:
            await asyncio.wait({stop, start}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                self._tell(start.result())
                await stop
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await self.supervisor.stop(self.hurry)
            (self.settings.home / "state.json").unlink(missing_ok=True)

    async def _start(self) -> str | None:
        """Start all; the key that was made, if one was."""
        await self._start_postgres()
        failed: list[StartFailed] = []
        try:
            async with asyncio.TaskGroup() as group:
                prefect = group.create_task(self.supervisor.start(self._prefect()))
                prepared = group.create_task(self._prepare())
                group.create_task(self.supervisor.start(self._api()))
                await prefect
                group.create_task(self.supervisor.start(self._node()))
                group.create_task(self.supervisor.start(self._jobs()))
                if importlib.util.find_spec("pymilvus"):
                    group.create_task(self.supervisor.start(self._vectors()))
        except* StartFailed as failures:
            failed += [error for error in failures.exceptions if isinstance(error, StartFailed)]
        if failed:
            raise failed[0]
        return prepared.result()

    async def _start_postgres(self) -> None:
        folder = self.settings.home / "postgres"
        command, options = await postgres.prepared(folder)
        service = Service(
            "postgres",
            command,
            {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            lambda: postgres.answers(folder),
            nice=postgres.NICE,
            stop_sign=signal.SIGINT,  # PostgreSQL's fast shutdown
            stop_s=STOP_S["postgres"],
            kill_sign=signal.SIGQUIT,  # and its immediate one: its log is replayed at the next start
            options=options,
        )
        await self.supervisor.start(service)
        await postgres.create_databases(folder, "prefect", "smi")

    def _prefect(self) -> Service:
        return Service(
            "prefect",
            prefect_server.command(self.settings),
            self.environment | prefect_server.environment(self.settings),
            lambda: prefect_server.answers(self.settings),
            port=self.settings.prefect_port,
            nice=prefect_server.NICE,
            within_s=120,
            stop_s=STOP_S["prefect"],
        )

    def _api(self) -> Service:
        health = f"http://{self.settings.host}:{self.settings.api_port}/health"
        return self._command("api", self.settings.api_port, lambda: prefect_server.http_answers(health))

    def _node(self) -> Service:
        port = self.settings.node_port
        service = self._command("node", port, lambda: _listens(f"{self.settings.host}:{port}"))
        service.command += ["--port", str(port)]  # this one and no other
        return service

    def _jobs(self) -> Service:
        async def at_once() -> bool:
            return True

        return self._command("jobs", None, at_once)

    def _vectors(self) -> Service:
        service = self._command("vectors", None, lambda: _listens(self.settings.vectors))
        service.nice = VECTORS_NICE
        return service

    def _command(self, name: str, port: int | None, ready: Callable[[], Any]) -> Service:
        command = [*CLI, name]
        return Service(name, command, self.environment, ready, port=port, within_s=120, stop_s=STOP_S[name])

    async def _prepare(self) -> str | None:
        command = [sys.executable, "-P", "-m", "deployments.up.prepare"]
        if self.wishes.new_key:
            command.append("--new-key")
        result = await self.supervisor.run_once("prepare", command, self.environment)
        key: str | None = json.loads(result)["key"]
        return key

    def _listen_to_signals(self) -> None:
        def stop() -> None:
            if self.told_to_stop.is_set():
                self.hurry.set()
            self.told_to_stop.set()

        loop = asyncio.get_running_loop()
        for sign in SIGNALS:
            if signal.getsignal(sign) is not signal.SIG_IGN:  # nohup stays nohup
                loop.add_signal_handler(sign, stop)

    def _tell(self, key: str | None) -> None:
        if self.wishes.as_json:
            pids = {entry.name: entry.pid for entry in self.supervisor.state.processes.values()}
            self.out(json.dumps(banner.facts(self.settings, key, pids)))
        else:
            self.out(banner.text(self.settings, key))


async def _listens(target: str) -> bool:
    """Whether a gRPC target, `unix:PATH` or `host:port`, takes connections."""
    try:
        if target.startswith("unix:"):
            _, writer = await asyncio.open_unix_connection(target.removeprefix("unix:"))
        else:
            host, _, port = target.rpartition(":")
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    writer.close()
    return True


def down(home: Path) -> list[str]:
    """Stop the installation from another process; names of what was running.

    Raises:
        SmiError: it did not stop in time, or another command is at work in `home`.
    """
    if not (home / "lock").exists():  # nothing was ever started here
        return []
    until = time.monotonic() + BEGIN_S
    while True:
        state = State.read(home)
        if state.up is not None and (process := state.up.process()) is not None:
            process.send_signal(signal.SIGTERM)
            if not processes.wait_gone(state.up, DOWN_S):
                raise SmiError(f"`smi up` (pid {state.up.pid}) has not stopped within {DOWN_S} s")
            return ["up", *state.processes]
        try:
            with processes.only_one(home):
                left = [entry.name for entry in processes.stop_leftovers(home)]
                (home / "state.json").unlink(missing_ok=True)
                return left
        except ConfigurationError:  # a `smi up` that has not said yet who it is
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


@dataclass(frozen=True)
class Status:
    """One process of the installation as it is now.

    Attributes:
        state: "healthy": it answers; "running": it has nothing to ask at; "does not answer"; "not running".
    """

    name: str
    pid: int
    port: int | None
    state: str


async def status(home: Path) -> list[Status]:
    """Each process that `smi up` recorded; empty when nothing is installed or running."""
    state = State.read(home)
    entries = ([state.up] if state.up else []) + list(state.processes.values())
    if not entries:
        return []
    settings = load_settings(home=home)
    return [Status(entry.name, entry.pid, entry.port, await _health(entry, settings)) for entry in entries]


async def _health(entry: Recorded, settings: Settings) -> str:
    if entry.process() is None:
        return "not running"
    probes = {
        "postgres": lambda: postgres.answers(settings.home / "postgres"),
        "prefect": lambda: prefect_server.answers(settings),
        "vectors": lambda: _listens(settings.vectors),
        "node": lambda: _listens(f"{settings.host}:{entry.port}"),
        "api": lambda: prefect_server.http_answers(f"http://{settings.host}:{entry.port}/health"),
    }
    probe = probes.get(entry.name)
    if probe is None:
        return "running"
    return "healthy" if await probe() else "does not answer"
