"""The jobs processor: starts waiting jobs where there is room, and ends those whose flow runs are over.

It keeps nothing in memory that matters. Every turn of its loop reads what is running from the table, so
that after a kill -9 it goes on where it was, and several may run beside one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from blocks.errors import ModelNotFound, NotFound, RunLost, StorageNotShared, Unavailable
from blocks.settings import Settings
from blocks.storage import Storage
from deployments.database import create_tables, engine_for, unfit
from deployments.jobs.runs import NotStarted, Run, Runs
from deployments.jobs.store import CHANNEL, Job, Jobs, Kind
from deployments.jobs.stored import NOT_SHARED, Failure, Stored, StoredRequest
from deployments.pools import RUNS_PER_NODE
from tasks.dispatch import Need, choose
from tasks.fleet import Fleet, close_fleet, current_fleet
from tasks.prefect_api import TERMINAL, prefect_http

BUSY_S = 0.25  # between turns while jobs run
IDLE_S = 1.0  # and while none does; a new job rings the bell
LOOK_S = 2.0  # between looks at workers that may have died
DEAD_S = 15.0  # a worker that has not been heard for so long is dead; it says something every 5 s
CANDIDATES = 64
PIPELINE = "pipeline"  # the flow whose runs are called by their pipelines' names

log = logging.getLogger("smi.jobs")


async def serve_jobs(settings: Settings) -> None:
    """Process jobs until SIGTERM or SIGINT. Jobs that run go on without it.

    Raises:
        ConfigurationError: a setting is missing.
    """
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    engine = engine_for(settings)
    async with prefect_http(settings) as http:
        fleet = await current_fleet(settings)
        processor = Processor(engine, Runs(http), fleet, Storage(settings.storage))
        try:
            await processor.serve(stopping)
        finally:
            await close_fleet()
            await engine.dispose()


class Processor:
    """One processor's loop over `jobs`, Prefect's runs and the fleet."""

    def __init__(self, engine: AsyncEngine, runs: Runs, fleet: Fleet, storage: Storage) -> None:
        self.jobs = Jobs(engine)
        self.runs, self.fleet, self.storage = runs, fleet, storage
        self._bell = asyncio.Event()
        self._looked = 0.0
        self._answering_since = time.monotonic()
        self._asked_to_cancel: set[str] = set()

    async def serve(self, stopping: asyncio.Event) -> None:
        bell = asyncio.create_task(listen(self.jobs.engine, self._bell.set))
        ring = asyncio.create_task(_when(stopping, self._bell.set))
        prepared = busy = False
        try:
            while not stopping.is_set():
                try:
                    prepared = prepared or await _prepare(self.jobs.engine)
                    busy = await self.turn()
                except httpx.HTTPError as error:
                    self._answering_since = time.monotonic()
                    log.warning("Prefect does not answer (%s); jobs wait", type(error).__name__)
                except (SQLAlchemyError, OSError) as error:
                    log.warning("database or storage do not answer (%s); jobs wait", type(error).__name__)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_S if busy else IDLE_S):
                        await self._bell.wait()
                self._bell.clear()
        finally:
            for task in (bell, ring):
                task.cancel()
            await asyncio.gather(bell, ring, return_exceptions=True)

    async def turn(self) -> bool:
        """One turn: end what is over, cancel what is to be, start what can be. Whether any job runs."""
        running = await self.jobs.running()
        for job in running:
            if job.flow_run_id is None:  # a processor was killed, or Prefect went away, in between
                await (self._stop if job.cancelling else self._start)(job)
        over = await self._end(running)
        left = [job for job in running if job.id not in over]
        await self._cancel(left)
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            await self._look(left)
        begun = await self._schedule(left)
        return bool(left or begun)

    async def _title(self, job: Job) -> str:
        """What the run is called: what it does, and for whom."""
        what = f"{job.flow} {job.model}"
        if job.flow == PIPELINE:
            with contextlib.suppress(NotFound, ValueError, LookupError):  # the run says what is wrong with it
                stored = await asyncio.to_thread(self.storage.read, Stored.of(job.id).reference)
                asked = StoredRequest.model_validate_json(stored)
                what = f"{job.flow} {asked.request['pipeline']['name']}"
        return f"{what} for {await self.jobs.owner(job)} ({job.request_id})"

    async def _start(self, job: Job) -> None:
        try:
            run_id = await self.runs.start(job, await self._title(job))
        except NotStarted as error:
            log.error("%s: cannot be started, and waits: %s", job.id, error)
            await self.jobs.put_back(job)
            return
        job.flow_run_id = run_id
        if await self.jobs.started(job, run_id):
            log.info("%s: attempt %d is run %s in pool %s", job.id, job.attempt, run_id, job.pool)
        else:  # ended meanwhile by another processor; a run that is over stays as it is
            await self.runs.cancel(run_id)

    async def _stop(self, job: Job) -> None:
        """A job to be cancelled of which no run is known."""
        job.flow_run_id = await self.runs.of(job)
        if job.flow_run_id is None:
            await self.jobs.end(job, "cancelled")
        else:
            await self.jobs.started(job, job.flow_run_id)

    async def _end(self, running: Sequence[Job]) -> set[str]:
        jobs = {job.flow_run_id: job for job in running if job.flow_run_id}
        ended = await self.runs.ended(jobs.keys()) if jobs else []
        for run in ended:
            await self._decide(jobs[run.id], run.state, run.state_name, run.message)
        return {jobs[run.id].id for run in ended}

    async def _decide(self, job: Job, state: str, name: str, message: str = "") -> None:
        """End the job; what one job left must not hold up the others."""
        try:
            await self._conclude(job, state, name, message)
        except (DBAPIError, ValueError) as error:
            if not unfit(error):
                raise
            log.error("%s: its end cannot be stored (%s)", job.id, type(error).__name__)
            lost = Failure(code="internal_error", message="how the job ended could not be stored")
            await self.jobs.end(job, "failed", lost)

    async def _conclude(self, job: Job, state: str, name: str, message: str) -> None:
        """What a run that is over means for its job. What is stored counts, not what Prefect was told."""
        stored = Stored.of(job.id, job.attempt)
        if await asyncio.to_thread(self.storage.exists, stored.result):
            await self.jobs.end(job, "succeeded")
        elif state == "CANCELLED" or job.cancelling:
            await self.jobs.end(job, "cancelled")
        else:
            failure = await self._failure(stored, name, message)
            if failure.retryable and job.attempt < job.max_attempts:
                await self.jobs.again(job, failure)
            else:
                await self.jobs.end(job, "failed", failure)
        self._asked_to_cancel.discard(job.id)
        log.info("%s: attempt %d ended as %s", job.id, job.attempt, name)

    async def _failure(self, stored: Stored, name: str, message: str) -> Failure:
        if await asyncio.to_thread(self.storage.exists, stored.error):
            return Failure.model_validate_json(await asyncio.to_thread(self.storage.read, stored.error))
        if name == NOT_SHARED:
            return Failure.of(StorageNotShared(message))
        if name == "Completed":  # the worker stored its result before it said so
            return Failure.of(self.storage.not_shared(stored.result))
        return Failure.of(RunLost(f"the flow run ended as {name} without a result"))

    async def _cancel(self, running: Sequence[Job]) -> None:
        for job in running:
            if job.cancelling and job.flow_run_id and job.id not in self._asked_to_cancel:
                await self.runs.cancel(job.flow_run_id)
                self._asked_to_cancel.add(job.id)

    async def _look(self, running: Sequence[Job]) -> None:
        """Give up runs that nobody works on any more."""
        jobs = {job.flow_run_id: job for job in running if job.flow_run_id}
        if not jobs:
            return
        found = {run.id: run for run in await self.runs.all(jobs.keys())}
        for run_id, job in jobs.items():
            if run_id not in found:
                await self._decide(job, "CRASHED", "deleted")
            elif job.cancelling and found[run_id].state != "CANCELLING":
                self._asked_to_cancel.discard(job.id)
        # Workers could not be heard while Prefect was away; give them time to be.
        if time.monotonic() - self._answering_since < DEAD_S:
            return
        pools = {job.pool for job in running if job.pool}
        silences = {pool: await self.runs.silences(pool) for pool in pools}
        for run_id, run in found.items():
            if _orphaned(run, silences[str(jobs[run_id].pool)]):
                await self.runs.give_up(run, "its worker is gone")

    async def _schedule(self, running: Sequence[Job]) -> int:
        """Start the best waiting jobs, no more than can run now."""
        room = Counter({node.pool: 0 for node in self.fleet.nodes.values()})
        for node in self.fleet.nodes.values():
            room[node.pool] += 0 if node.draining else RUNS_PER_NODE
        for job in running:
            room[str(job.pool)] -= 1
        if not any(free > 0 for free in room.values()):
            return 0
        # Jobs that no node can take now must not fill the window.
        kinds = [kind for kind in await self.jobs.kinds_waiting() if await self._pool_for(kind, room)]
        begun = 0
        for job in await self.jobs.waiting(CANDIDATES, kinds) if kinds else []:
            pool = await self._pool_for(Kind(job.flow, job.model, job.priority), room)
            claimed = await self.jobs.claim(job, pool) if pool else None
            if claimed is not None:
                room[str(pool)] -= 1
                begun += 1
                await self._start(claimed)
        return begun

    async def _pool_for(self, kind: Kind, room: Counter[str]) -> str | None:
        """The pool of the node that the dispatcher would choose for the heaviest step of such a job."""
        nodes = [node for node in self.fleet.nodes.values() if room[node.pool] > 0]
        if not nodes or not await self.runs.deployed(kind.flow):
            return None
        try:
            model = self.fleet.catalogue.get(kind.model)
            need = Need(model.name, int(model.memory), kind.priority)
            return self.fleet.nodes[choose(nodes, need).node].pool
        except Unavailable:
            return None
        except ModelNotFound:  # taken out of the catalogue since: the flow says so
            return nodes[0].pool


def _orphaned(run: Run, silences: dict[str, float]) -> bool:
    if run.state in TERMINAL or run.state == "SCHEDULED":
        return False
    if run.worker is None:  # taken, and the worker ended before it said so
        return (datetime.now(UTC) - run.since).total_seconds() > DEAD_S
    return silences.get(run.worker, float("inf")) > DEAD_S


async def _prepare(engine: AsyncEngine) -> bool:
    await create_tables(engine)
    return True


async def _when(event: asyncio.Event, act: Callable[[], object]) -> None:
    await event.wait()
    act()


async def listen(engine: AsyncEngine, ring: Callable[[], object]) -> None:
    """Ring on every notification, and after a lost connection, when some may have been missed."""

    while True:
        try:
            async with engine.connect() as connection:
                await _listen(connection, ring)
        except (SQLAlchemyError, OSError) as error:
            log.debug("not listening: %s", type(error).__name__)
        await asyncio.sleep(IDLE_S)


async def _listen(connection: AsyncConnection, ring: Callable[[], object]) -> None:
    driver = (await connection.get_raw_connection()).driver_connection
    assert driver is not None
    lost = asyncio.Event()

    def heard(*_: Any) -> None:
        ring()

    driver.add_termination_listener(lambda _: lost.set())
    await driver.add_listener(CHANNEL, heard)
    ring()
    try:
        await lost.wait()
    finally:
        if not driver.is_closed():
            await driver.remove_listener(CHANNEL, heard)
