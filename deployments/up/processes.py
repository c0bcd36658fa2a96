"""Who runs: pids, start times and ports, in the home folder's state.json.

A pid alone may by now be somebody else's; a pid with its start time is that process or none. Every child
leads a session of its own, so what it started in turn is found by its session. A child's environment says
whose it is, for a `smi up` that is killed between starting a child and writing it down.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from blocks.errors import ConfigurationError

SERVICE, HOME = "SMI_SERVICE", "SMI_HOME"  # in every child's environment
SAME_START_S = 1.5  # the kernel's boot time, and so psutil's start times, may move by a second


@dataclass(frozen=True)
class Recorded:
    """A process as it was when it started. `started` in seconds since the epoch."""

    name: str
    pid: int
    started: float
    port: int | None = None

    @classmethod
    def of(cls, name: str, pid: int, port: int | None = None) -> Recorded:
        return cls(name, pid, psutil.Process(pid).create_time(), port)

    def same(self) -> bool:
        """Whether the pid still is the process recorded, ended perhaps but not yet collected."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < SAME_START_S
        except psutil.NoSuchProcess:
            return False

    def process(self) -> psutil.Process | None:
        """The process, if it still runs and is the one recorded."""
        try:
            process = psutil.Process(self.pid)
            return process if self.same() and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


@dataclass
class State:
    """What `smi up` has started. `up` is itself; `processes` in the order of their start."""

    up: Recorded | None = None
    processes: dict[str, Recorded] = field(default_factory=dict)

    @classmethod
    def read(cls, home: Path) -> State:
        try:
            raw = json.loads((home / "state.json").read_text())
        except (FileNotFoundError, ValueError):
            return cls()
        entries = [Recorded(**entry) for entry in raw["processes"]]
        return cls(Recorded(**raw["up"]) if raw["up"] else None, {entry.name: entry for entry in entries})

    def write(self, home: Path) -> None:
        entries = [asdict(entry) for entry in self.processes.values()]
        write_private(
            home / "state.json", json.dumps({"up": self.up and asdict(self.up), "processes": entries})
        )


def write_private(path: Path, text: str) -> None:
    """Write `text`, mode 0600, so that readers see the old or the new."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold the home folder's lock; the kernel lets go of it however this process ends.

    Raises:
        ConfigurationError: naming the process that holds it.
    """
    with open(home / "lock", "a+") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"already running, pid {file.read() or 'unknown'}, with home {home}; `smi down` stops it"
            ) from None
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def members(recorded: Recorded, home: Path) -> list[psutil.Process]:
    """The recorded process and what it left in its session, none of them anybody else's."""
    if not recorded.same() and psutil.pid_exists(recorded.pid):
        return []  # the pid is somebody else's now, and so is a session of that number
    leader = recorded.process()
    found = [leader] if leader else []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            if (
                process.pid != recorded.pid
                and os.getsid(process.pid) == recorded.pid
                and _ours(process, home)
            ):
                found.append(process)
    return found


def _ours(process: psutil.Process, home: Path) -> bool:
    environment = process.environ()
    return SERVICE in environment and environment.get(HOME) == str(home)


def unrecorded(home: Path) -> dict[psutil.Process, Recorded]:
    """What was started by a `smi up` that was killed before it could write it down.

    Not this process's ancestors and session: a shell may have its environment from a child.
    """
    found = {}
    spared = {parent.pid for parent in psutil.Process().parents()}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            if process.pid in spared or os.getsid(process.pid) == os.getsid(0):
                continue
            if _ours(process, home):
                found[process] = Recorded.of(process.environ()[SERVICE], process.pid)
    return found


def stop_leftovers(home: Path) -> list[Recorded]:
    """Stop what a killed `smi up` left running, last started first; those that ran."""
    left = []
    for recorded in reversed(State.read(home).processes.values()):
        found = members(recorded, home)
        if found:
            left.append(recorded)
            end(found, _stop_sign(recorded), grace_s=5)
    strays = unrecorded(home)
    for sign in (signal.SIGTERM, signal.SIGINT):  # PostgreSQL last
        end([process for process, entry in strays.items() if _stop_sign(entry) == sign], sign, grace_s=5)
    return left + list(strays.values())


def _stop_sign(recorded: Recorded) -> signal.Signals:
    return signal.SIGINT if recorded.name == "postgres" else signal.SIGTERM


def end(processes: Iterable[psutil.Process], sign: signal.Signals, grace_s: float) -> None:
    """Ask with `sign`, wait, then kill."""
    processes = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(sign)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2)


def wait_gone(recorded: Recorded, timeout_s: float) -> bool:
    """Whether the process ended within the time."""
    until = time.monotonic() + timeout_s
    while recorded.process() is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str) -> int:
    """A port that nobody has now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def holder(port: int) -> str:
    """Who listens on `port`, for a message."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            if connection.pid is None:
                break
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(connection.pid)
                return f"pid {process.pid} ({' '.join(process.cmdline()[:4]) or process.name()})"
    return "a process that this user may not see"
