"""Start children in order, keep them running, stop them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from blocks.errors import SmiError
from deployments.up.processes import HOME, SERVICE, Recorded, State, end, members

LARGEST_LOG = 5_000_000  # bytes; a larger one becomes NAME.log.1 at the next start
BACK_OFF_S = (0.5, 1, 2, 5, 10, 30)
STEADY_S = 60  # one that ran so long starts with the shortest wait again
PROBE_S = 0.1
# Each needs those before it; stopped from the end.
ORDER = ("postgres", "prefect", "vectors", "node", "jobs", "api")

Say = Callable[[str], None]


class StartFailed(SmiError):
    """A child ended, or did not answer in time, while the installation started."""

    code = "start_failed"


@dataclass
class Service:
    """One child: how to start it, how to know that it is up, how to ask it to stop."""

    name: str
    command: list[str]
    environment: dict[str, str]
    ready: Callable[[], Awaitable[bool]]
    port: int | None = None
    nice: int = 0
    within_s: float = 60
    stop_sign: signal.Signals = signal.SIGTERM
    stop_s: float = 4
    kill_sign: signal.Signals = signal.SIGKILL
    options: dict[str, Any] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None


class Supervisor:
    """The children of one `smi up`. `state` is kept in the home folder as they come and go."""

    def __init__(self, home: Path, say: Say) -> None:
        self.home, self.say = home, say
        self.state = State()
        self._services: list[Service] = []
        self._watches: list[asyncio.Task[None]] = []
        self.stopping = False

    async def start(self, service: Service) -> None:
        """Start it and wait until it is ready; from then on it is started again when it ends.

        Raises:
            StartFailed: with the end of its log.
        """
        began = time.monotonic()
        self._services.append(service)
        await self._spawn(service)
        await self._until_ready(service)
        self.say(f"{service.name} ... {time.monotonic() - began:.1f} s")
        self._watches.append(asyncio.create_task(self._keep(service)))

    async def run_once(self, name: str, command: list[str], environment: dict[str, str]) -> str:
        """Run a command to its end and return what it printed; its errors go to its log.

        Raises:
            StartFailed: it failed; with the end of its log.
        """
        began = time.monotonic()
        with open_log(self.log(name)) as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._marked(name, environment),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended at once
            self._record(Recorded.of(name, process.pid))
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            self._forget(name)
        if process.returncode:
            raise StartFailed(f"{name} ended with {ending(process.returncode)}.\n{tail(self.log(name))}")
        self.say(f"{name} ... {time.monotonic() - began:.1f} s")
        return output.decode()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop all in reverse order; when `hurry` is set, at once."""
        self.stopping = True
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for service in sorted(self._services, key=lambda service: ORDER.index(service.name), reverse=True):
            await self._stop(service, hurry)

    def _marked(self, name: str, environment: dict[str, str]) -> dict[str, str]:
        """By which a child is found again if we are killed before it is recorded."""
        return {**environment, SERVICE: name, HOME: str(self.home)}

    def log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    async def _spawn(self, service: Service) -> None:
        with open_log(self.log(service.name)) as log:
            service.process = await asyncio.create_subprocess_exec(
                *service.command,
                env=self._marked(service.name, service.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **({"cwd": self.home} | service.options),
            )
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended at once: whoever waits for it says so
            self._record(Recorded.of(service.name, service.process.pid, service.port))
            if service.nice:
                be_nice(service.process.pid, service.nice)

    async def _until_ready(self, service: Service) -> None:
        assert service.process is not None
        until = time.monotonic() + service.within_s
        while not await service.ready():
            fault = ""
            if service.process.returncode is not None:
                fault = f"ended with {ending(service.process.returncode)} while it started"
            elif time.monotonic() > until:
                fault = f"did not answer within {service.within_s:.0f} s"
            if fault:
                raise StartFailed(f"{service.name} {fault}.\n{tail(self.log(service.name))}")
            await asyncio.sleep(PROBE_S)

    async def _keep(self, service: Service) -> None:
        failures = 0
        while True:
            assert service.process is not None
            began = time.monotonic()
            code = await service.process.wait()
            await asyncio.to_thread(self._sweep, service)
            failures = 0 if time.monotonic() - began > STEADY_S else failures
            wait = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            failures += 1
            self.say(f"{service.name} ended with {ending(code)}; starting it again in {wait} s")
            if failures >= 3:
                self.say(f"{service.name} keeps ending. {tail(self.log(service.name))}")
            await asyncio.sleep(wait)
            try:
                await self._spawn(service)
            except OSError as error:  # no memory or no descriptor for one more process, now
                self.say(f"{service.name} cannot be started ({error.strerror})")

    async def _stop(self, service: Service, hurry: asyncio.Event) -> None:
        process = service.process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(service.stop_sign)
            ended = asyncio.ensure_future(process.wait())
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait({ended, hurried}, timeout=service.stop_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not ended.done():
                self.say(f"{service.name} has not stopped; {service.kill_sign.name}")
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(service.kill_sign)
                await ended
        await asyncio.to_thread(self._sweep, service)
        self._forget(service.name)

    def _record(self, recorded: Recorded) -> None:
        self.state.processes[recorded.name] = recorded
        self._write()

    def _forget(self, name: str) -> None:
        self.state.processes.pop(name, None)
        self._write()

    def _write(self) -> None:
        try:
            self.state.write(self.home)
        except OSError as error:  # a full disk, say: children are kept and stopped all the same
            self.say(f"state.json cannot be written ({error.strerror}): `smi status` may be wrong")

    def _sweep(self, service: Service) -> None:
        """End what an ended child left behind in its session."""
        recorded = self.state.processes.get(service.name)
        if recorded is not None:
            end(members(recorded, self.home), signal.SIGTERM, grace_s=2)


def be_nice(pid: int, nice: int) -> None:
    """Lower a process's claim to the CPU, also where the kernel weighs whole sessions (autogroup)."""
    psutil.Process(pid).nice(nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def open_log(path: Path) -> IO[bytes]:
    """The log, to be appended to; a large one is put aside first."""
    if path.exists() and path.stat().st_size > LARGEST_LOG:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, with its name."""
    try:
        text = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        text = []
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in text)])


def ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
