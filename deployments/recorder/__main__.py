"""`python -m deployments.recorder SPOOL`: the recorder's process, started by the API that owns SPOOL.

Its settings come as one line of JSON on stdin; the end of stdin means that the API has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from blocks.settings import Settings
from deployments.recorder.journal import Journal
from deployments.recorder.retention import keep_within
from deployments.recorder.spool import DRAIN_S
from deployments.recorder.writer import Writer, adopt, pause, report
from tasks.prefect_api import prefect_http

log = logging.getLogger("smi.recorder")


async def main(folder: Path) -> None:
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer
    )
    handover = await stdin.readline()
    if not handover:
        return
    settings = Settings.model_validate_json(handover)
    dead = asyncio.Event()
    async with prefect_http(settings, timeout_s=30) as http, asyncio.TaskGroup() as group:
        aside = [
            group.create_task(adopt(folder.parent, http)),
            group.create_task(keep_within(http, settings.live_runs_days, settings.live_runs_max)),
            group.create_task(until_end(stdin, dead)),
        ]
        journal = await own(folder, dead)
        if journal is None:
            for task in aside:
                task.cancel()
            return
        writer = Writer(journal, http)
        aside.append(group.create_task(report(writer)))
        follow = group.create_task(writer.follow(dead))
        await dead.wait()
        _, late = await asyncio.wait([follow], timeout=DRAIN_S)
        for task in (*aside, *late):
            task.cancel()
    if late:
        log.warning("the API has ended; %s waits for the next recorder", folder)
    else:
        journal.remove()


async def own(folder: Path, dead: asyncio.Event) -> Journal | None:
    """The journal of our API, as soon as an earlier recorder lets go of it; None if the API ends before."""
    while not dead.is_set():
        if (journal := Journal.claim(folder)) is not None:
            return journal
        await pause(0.1, dead)
    return None


async def until_end(stdin: asyncio.StreamReader, dead: asyncio.Event) -> None:
    """Set `dead` when stdin ends, or on SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, dead.set)
    while await stdin.read(1024):
        pass
    dead.set()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # they go to the whole group; our API tells us when
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(main(Path(sys.argv[1])))
