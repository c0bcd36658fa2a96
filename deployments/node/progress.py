"""How far a run is: written to storage as it changes, for whoever asks on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blocks.storage import Storage
from deployments.jobs.stored import Progress
from tasks.job import JobRun

EVERY_S = 0.5  # between two writes

log = logging.getLogger("smi.worker")


@asynccontextmanager
async def kept_in(storage: Storage, reference: str, run: JobRun) -> AsyncIterator[None]:
    """Within it, `run`'s progress is written to `reference` as it changes, and at the end once more."""
    changed, over = asyncio.Event(), asyncio.Event()
    run.changed = lambda _: changed.set()
    writing = asyncio.create_task(_write(storage, reference, run, changed, over))
    try:
        yield
    finally:
        over.set()
        changed.set()
        await writing


async def _write(
    storage: Storage, reference: str, run: JobRun, changed: asyncio.Event, over: asyncio.Event
) -> None:
    last = False
    while not last:
        await changed.wait()
        changed.clear()
        last = over.is_set()
        text = Progress.of(run).model_dump_json().encode()
        # Each kind of storage has errors of its own, and none of them may hide how the run itself ended.
        written = asyncio.to_thread(storage.write, reference, text)
        (error,) = await asyncio.gather(written, return_exceptions=True)
        if isinstance(error, Exception):
            log.warning("%s cannot be written: %s", reference, type(error).__name__)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await over.wait()
