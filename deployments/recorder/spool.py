"""The API's side of the record: append to the spool, and keep the recorder's process alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass, replace

import orjson

from blocks.settings import Settings
from deployments.recorder.lines import end_line, start_line
from deployments.recorder.segments import Segments
from tasks.live import LiveRun

SPOOL_BYTES = 256 * 1024 * 1024
SEGMENT_BYTES = 4 * 1024 * 1024
DRAIN_S = 2.0  # how long a recorder goes on writing after its API has ended
OPEN_S = 0.5  # how long runs that were just cancelled may take to say so
BACKOFF_S = (0.1, 5.0)
STEADY_S = 10.0  # a recorder that lives so long is well
STALE_S = 5.0  # it writes its status each second

log = logging.getLogger("smi.recorder")


@dataclass(frozen=True, slots=True)
class RecorderStatus:
    """How the record keeps up.

    Attributes:
        backlog: lines (starts and ends of runs) in this API's spool that the recorder has not written yet.
        recorded: runs written to Prefect, to their end.
        dropped: runs that will never be recorded, because the spool's bound was reached.
        failed: runs that Prefect refused for good.
        lag_s: seconds that the record is behind.
        error: why nothing can be written now, else empty.
    """

    backlog: int = 0
    recorded: int = 0
    dropped: int = 0
    failed: int = 0
    lag_s: float = 0.0
    error: str = ""


class SpoolRecorder:
    """`flows.live.Recorder` over a spool below `home/spool`.

    Args:
        limit: bytes that all spools may hold; beyond it runs are dropped, and counted.
        segment: bytes after which a new file is begun.
    """

    def __init__(self, settings: Settings, limit: int = SPOOL_BYTES, segment: int = SEGMENT_BYTES) -> None:
        self._settings = settings
        self._segments = Segments(settings.home / "spool", limit, segment)
        self._keys: dict[int, int] = {}  # id of a run that goes on -> its key
        self._last_key = 0
        self._lines = 0
        self._dropped = 0
        self._keeper: asyncio.Task[None] | None = None
        self._short = 0  # recorders that ended within STEADY_S, one after another
        self._begun, self._opened = time.monotonic(), time.time()
        self.process: asyncio.subprocess.Process | None = None
        self.folder = self._segments.folder

    async def start(self) -> None:
        """Open the spool and start the recorder's process.

        Raises:
            ConfigurationError: Prefect's URL or auth string is missing.
        """
        handover = {
            "home": str(self._settings.home),
            "prefect_url": self._settings.require("prefect_url"),
            "prefect_auth": self._settings.require("prefect_auth"),
            "live_runs_days": self._settings.live_runs_days,
            "live_runs_max": self._settings.live_runs_max,
        }
        self._segments.open()
        self._keeper = asyncio.create_task(self._keep(orjson.dumps(handover) + b"\n"))

    async def stop(self) -> None:
        """Close the spool, and give the recorder's process a few seconds to write what is left.

        Takes at most `OPEN_S + DRAIN_S + 1` seconds.
        """
        if self._keeper is None:
            return
        for _ in range(20):
            if self._keys:
                await asyncio.sleep(OPEN_S / 20)
        self._segments.close()
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        self._keeper = None
        process = self.process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), DRAIN_S + 1)
        except TimeoutError:
            process.kill()
            await process.wait()

    def started(self, run: LiveRun) -> None:
        if self._segments.full:
            self._dropped += 1
            return
        self._last_key += 1
        try:
            line = start_line(self._last_key, run)
        except TypeError as error:
            self._dropped += 1
            log.error("a run of %r cannot be recorded: %s", run.flow, error)
            return
        self._keys[id(run)] = self._last_key
        self._lines += 1
        self._segments.append(line)

    def ended(self, run: LiveRun) -> None:
        key = self._keys.pop(id(run), None)
        if key is None:  # dropped when it started
            return
        try:
            line = end_line(key, run)
        except TypeError as error:  # the end counts more than what could not be written down
            log.error("labels of a run of %r cannot be recorded: %s", run.flow, error)
            line = end_line(key, replace(run, labels={}, steps=[]))
        self._lines += 1
        self._segments.append(line)

    def status(self) -> RecorderStatus:
        """As the recorder's process last said it, at most a second ago, and what was dropped here."""
        try:
            said = orjson.loads((self.folder / "status.json").read_bytes())
        except (FileNotFoundError, ValueError):
            error = self._fault(self._opened, self._lines)
            return RecorderStatus(backlog=self._lines, dropped=self._dropped, error=error)
        backlog = max(0, self._lines - int(said["lines"]))
        oldest = float(said["oldest"]) or float(said["time"])
        return RecorderStatus(
            backlog=backlog,
            recorded=int(said["recorded"]),
            dropped=self._dropped,
            failed=int(said["failed"]),
            lag_s=max(0.0, time.time() - oldest) if backlog else float(said["lag_s"]),
            error=str(said["error"]) or self._fault(float(said["time"]), backlog),
        )

    def _fault(self, told: float, backlog: int) -> str:
        """What is wrong with the recorder's process, which said something last at `told`; else empty."""
        alive = self.process is not None and self.process.returncode is None
        if self._short > 1 and not (alive and time.monotonic() - self._begun > STEADY_S):
            return "the recorder's process keeps ending; the API's log says why"
        silent = time.time() - told
        if silent > STALE_S and (backlog or not alive):
            return f"the recorder's process has said nothing for {silent:.0f} s"
        return ""

    async def _keep(self, handover: bytes) -> None:
        """Start the process anew whenever it ends."""
        while True:
            self._begun = time.monotonic()
            try:
                said = f"ended with {await self._run(handover)}"
            except OSError as error:  # no memory or no descriptor for one more process, now
                said = f"cannot be started ({error.strerror})"
            self._short = 0 if time.monotonic() - self._begun > STEADY_S else self._short + 1
            delay = min(BACKOFF_S[0] * 2 ** min(self._short, 10), BACKOFF_S[1])
            log.warning("the recorder %s; starting it again in %.1f s", said, delay)
            await asyncio.sleep(delay)

    async def _run(self, handover: bytes) -> int:
        """The recorder's process, from its start to its end."""
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "deployments.recorder",
            str(self.folder),
            stdin=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(handover)  # by the pipe: secrets stay out of argv and environ
        return await process.wait()
