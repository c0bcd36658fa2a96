"""The recorder's loop: what the spool says goes to Prefect, in order, for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from pathlib import Path

import httpx
import orjson

from deployments.recorder.calls import Away, Calls, understood
from deployments.recorder.journal import BATCH_LINES, Batch, Journal, replace
from deployments.recorder.prefect_runs import PrefectRuns
from deployments.recorder.segments import API_LOCK, held

TICK_S = 0.4
ADOPT_S = 2.0
STATUS_S = 1.0
BACKOFF_S = (0.1, 2.0)
BREATH, LONG_BREATH = 0.5, 3.0  # while catching up: pause for this multiple of the time that a batch took
PATIENCE = 4  # times that a batch may meet a 500 before it is searched for a run that causes it

log = logging.getLogger("smi.recorder")


class Writer:
    """Writes one journal to Prefect."""

    def __init__(self, journal: Journal, http: httpx.AsyncClient) -> None:
        self.journal = journal
        self.error = ""
        self.lag_s = 0.0
        self.oldest = 0.0  # when the oldest thing happened that is taken and not written; 0: nothing is
        self._calls = Calls(http)
        self._runs = PrefectRuns(self._calls, journal.name)
        self._doubt = True  # whether an earlier attempt, or an earlier process, may have written this

    async def follow(self, dead: asyncio.Event) -> None:
        """Write what is there and what comes, until all of a dead API's spool is written."""
        while True:
            ended = dead.is_set()
            begun, position, waiting = time.monotonic(), self.journal.lines, self.journal.waiting()
            batch = self.journal.take(ended)
            if batch:
                await self._write(batch)
            if batch or self.journal.lines > position:
                self.journal.commit()
            elif ended:
                return
            await self._confirm()
            if self.journal.lines - position < BATCH_LINES:
                await pause(TICK_S, dead)
            else:  # more is waiting; leave time for others, the more while live requests outrun us
                breath = BREATH if self.journal.waiting() <= waiting else LONG_BREATH
                await asyncio.sleep(breath * (time.monotonic() - begun))

    async def _confirm(self) -> None:
        """Go on only while Prefect keeps up with the steps."""
        while True:
            try:
                with understood():
                    await self._runs.steps.confirm()
            except Away as error:
                self._tell(str(error))
            if not self._runs.steps.full:
                return
            await asyncio.sleep(TICK_S)

    async def _write(self, batch: Batch) -> None:
        self.oldest = batch.oldest
        delay, attempts = BACKOFF_S[0], 0
        while True:
            try:
                with understood():
                    await self._runs.write(batch.over, batch.running, self._doubt)
                break
            except Away as error:
                self._tell(str(error))
                self._doubt, attempts = True, attempts + 1
                self._calls.bisect_500 = attempts >= PATIENCE and await self._calls.healthy()
                await asyncio.sleep(delay)
                delay = min(delay * 2, BACKOFF_S[1])
        self._tell("")
        self._doubt = self._calls.bisect_500 = False
        self.lag_s = max(0.0, time.time() - batch.oldest)
        self.oldest = 0.0
        self.journal.recorded += len(batch.over) - self._runs.failed
        self.journal.failed += self._runs.failed

    def _tell(self, error: str) -> None:
        if error != self.error:
            if error:
                log.error("live runs are not recorded, they wait in the spool: %s", error)
            else:
                log.info("live runs are recorded again")
        self.error = error


async def report(writer: Writer) -> None:
    """Write the status file that the API reads, each second."""
    while True:
        journal = writer.journal
        status = {
            "pid": os.getpid(),
            "time": time.time(),
            "lines": journal.committed,
            "recorded": journal.recorded,
            "failed": journal.failed,
            "oldest": writer.oldest,
            "lag_s": writer.lag_s,
            "error": writer.error,
        }
        replace(journal.folder / "status.json", orjson.dumps(status))
        await asyncio.sleep(STATUS_S)


async def adopt(spools: Path, http: httpx.AsyncClient) -> None:
    """Write the spools that dead APIs left, oldest first, again and again."""
    dead = asyncio.Event()
    dead.set()
    while True:
        for folder in dead_spools(spools):
            await write_dead(folder, http, dead)
        await asyncio.sleep(ADOPT_S)


def dead_spools(spools: Path) -> list[Path]:
    return [path.parent for path in sorted(spools.glob(f"[!.]*/{API_LOCK}")) if not held(path)]


async def write_dead(folder: Path, http: httpx.AsyncClient, dead: asyncio.Event) -> None:
    """Write one dead spool. One that cannot be written is moved to `damaged`, where nobody looks again."""
    journal: Journal | None = None
    try:
        if (journal := Journal.claim(folder)) is None:
            return
        await Writer(journal, http).follow(dead)
        shutil.rmtree(folder)
        log.info("the spool %s of an API that ended is written", folder.name)
    except OSError as error:  # the disk's state may pass
        log.error("the spool %s cannot be worked on now: %s", folder, error)
    except Exception:  # the record of live runs goes on in this process, whatever is wrong here
        log.exception("the spool %s cannot be written; it is put aside", folder)
        with contextlib.suppress(OSError):
            put_aside(folder)
    finally:
        if journal is not None:
            journal.close()


def put_aside(folder: Path) -> None:
    damaged = folder.parent / "damaged"
    damaged.mkdir(mode=0o700, exist_ok=True)
    folder.rename(damaged / folder.name)


async def pause(seconds: float, event: asyncio.Event) -> None:
    """Wait for `event`, at most `seconds`; not at all once it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
