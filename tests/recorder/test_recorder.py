"""Live runs arrive in a real Prefect: whole, in order, once, whatever dies in between."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from blocks.settings import Settings
from deployments.recorder.spool import SpoolRecorder
from tasks.live import StepRecord

API = """
import asyncio, os, sys
from pathlib import Path
from blocks.settings import Settings
from deployments.recorder.spool import SpoolRecorder
from tasks.live import LiveRun

async def main():
    recorder = SpoolRecorder(Settings.model_validate_json(sys.stdin.readline()))
    await recorder.start()
    recorder.started(LiveRun(sys.argv[1], "req_cut"))
    await asyncio.sleep(0.3)
    print(recorder.folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def recording(settings: Settings) -> AsyncIterator[SpoolRecorder]:
    recorder = SpoolRecorder(settings)
    await recorder.start()
    try:
        yield recorder
    finally:
        await recorder.stop()


async def drained(recorder: SpoolRecorder, recorded: int, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while recorder.status().recorded < recorded:
            await asyncio.sleep(0.1)


def request_of(run: dict[str, Any]) -> str:
    """A run's name says whose it is; its label has the request id alone."""
    assert run["name"].endswith(f" for system ({run['labels']['request_id']})")
    return str(run["labels"]["request_id"])


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def test_a_run_is_found_with_its_steps_and_true_times(prefect, settings, ending, eventually) -> None:
    async with recording(settings) as recorder:
        run = prefect.run()
        recorder.started(run)
        run.started -= 3
        ending(run, state="FAILED", message="overloaded: every slot is taken")
        failed = StepRecord("dispatch", run.started + 1, run.started + 2, "FAILED", "overloaded: full")
        run.steps.append(failed)
        recorder.ended(run)
        await drained(recorder, 1)
        assert recorder.process.returncode is None
    assert recorder.process.returncode == 0
    assert not recorder.folder.exists()
    (found,) = await prefect.runs()
    assert (request_of(found), found["state_type"]) == (run.request_id, "FAILED")
    assert found["state"]["message"] == run.message
    assert set(found["tags"]) == {run.request_id, "live", "tier:local", "model:echo"}
    assert found["labels"]["completion_tokens"] == 3
    assert (found["labels"]["started"], found["labels"]["ended"]) == (run.started, run.ended)
    assert found["work_pool_name"] is None

    async def steps_are_there() -> bool:
        return len(await prefect.steps(found)) == 3

    await eventually(steps_are_there)
    steps = sorted(await prefect.steps(found), key=lambda step: step["name"])
    assert [(step["name"], step["state_name"]) for step in steps] == [
        ("dispatch", "Completed"),
        ("dispatch-1", "Failed"),
        ("generate", "Completed"),
    ]
    for step, record in zip(steps, (run.steps[1], failed, run.steps[0]), strict=True):
        assert abs(seconds(step["start_time"]) - record.started) < 1e-5
        assert abs(seconds(step["end_time"]) - record.ended) < 1e-5
        assert abs(step["total_run_time"] - (record.ended - record.started)) < 1e-5
    assert steps[1]["state"]["message"] == "overloaded: full"


async def test_a_long_run_is_seen_running_and_then_completed(prefect, settings, ending, eventually) -> None:
    async with recording(settings) as recorder:
        run = prefect.run()
        recorder.started(run)

        async def runs() -> bool:
            return [found["state_type"] for found in await prefect.runs()] == ["RUNNING"]

        await eventually(runs)
        recorder.ended(ending(run))
        await drained(recorder, 1)
    (found,) = await prefect.runs()
    assert (found["state_type"], found["labels"]["ended"]) == ("COMPLETED", run.ended)
    assert "model:echo" in found["tags"]
    assert await prefect.states(found) == ["RUNNING", "COMPLETED"]


async def test_a_hundred_records_come_in_order(prefect, settings, ending) -> None:
    runs = [prefect.run(f"req_{number:03d}") for number in range(100)]
    async with recording(settings) as recorder:
        for run in runs:
            recorder.started(run)
        for run in runs:
            recorder.ended(ending(run))
        await drained(recorder, 100)
    assert [request_of(found) for found in await prefect.runs()] == [run.request_id for run in runs]


async def test_records_wait_while_prefect_is_away_and_come_in_order(prefect, settings, line, ending) -> None:
    runs = [prefect.run(f"req_{number:03d}") for number in range(60)]
    async with recording(settings) as recorder:
        for run in runs[:20]:
            recorder.started(run)
            recorder.ended(ending(run))
        await drained(recorder, 20)
        await line.down()
        for run in runs[20:]:
            recorder.started(run)
            recorder.ended(ending(run))
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.5)
        away = recorder.status()
        assert (away.recorded, away.backlog >= 60, away.dropped) == (20, True, 0)
        assert "does not answer" in away.error
        assert away.lag_s > 1
        await line.up()
        await drained(recorder, 60)
    assert [request_of(found) for found in await prefect.runs()] == [run.request_id for run in runs]


async def test_a_killed_recorder_loses_and_doubles_nothing(prefect, settings, ending) -> None:
    """Some runs are long, so that kills fall between their start and their end in Prefect."""
    runs = [prefect.run(f"req_{number:03d}") for number in range(40)]
    async with recording(settings) as recorder:
        for number, run in enumerate(runs):
            recorder.started(run)
            if number >= 10:
                recorder.ended(ending(run))
            if number % 10 == 9:
                await asyncio.sleep(1.0)
                kill(recorder)
        for run in runs[:10]:
            recorder.ended(ending(run))
        await asyncio.sleep(0.7)
        kill(recorder)
        await drained(recorder, 40)
        assert recorder.status().failed == 0
    found = await prefect.runs()
    assert sorted(request_of(run) for run in found) == [run.request_id for run in runs]
    assert {run["state_type"] for run in found} == {"COMPLETED"}
    for run in found[:15]:
        states = await prefect.states(run)
        assert states in (["RUNNING", "COMPLETED"], ["COMPLETED"])


def kill(recorder: SpoolRecorder) -> None:
    if recorder.process.returncode is None:  # else it is about to be started again
        recorder.process.kill()


async def crashed_api(settings: Settings, flow: str) -> Path:
    """Kill an API that has a run going on; the folder of its spool."""
    wire = {name: settings.require(name) for name in ("home", "prefect_url", "prefect_auth")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", API, flow, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(json.dumps(wire).encode() + b"\n")
    folder = Path((await process.stdout.readline()).decode().strip())
    process.kill()
    await process.wait()
    return folder


async def test_runs_of_a_crashed_api_become_crashed(prefect, settings, eventually) -> None:
    folder = await crashed_api(settings, prefect.flow)

    async def gone() -> bool:
        return not folder.exists()

    await eventually(gone)
    (found,) = await prefect.runs()
    assert (request_of(found), found["state_type"]) == ("req_cut", "CRASHED")
    assert "API process ended" in found["state"]["message"]


async def test_a_spool_that_a_crashed_api_left_is_picked_up(prefect, settings, line, eventually) -> None:
    await line.down()
    folder = await crashed_api(settings, prefect.flow)

    async def alone() -> bool:
        return not any(str(folder) in process.info["cmdline"] for process in recorders())

    await eventually(alone)
    assert folder.exists()
    await line.up()
    async with recording(settings):

        async def gone() -> bool:
            return not folder.exists()

        await eventually(gone)
    assert [found["state_type"] for found in await prefect.runs()] == ["CRASHED"]


def recorders() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and "deployments.recorder" in process.info["cmdline"]
    ]


async def test_a_record_that_prefect_refuses_does_not_hold_up_others(prefect, settings, ending) -> None:
    runs = [prefect.run(f"req_{number}") for number in range(9)]
    async with recording(settings) as recorder:
        for number, run in enumerate(runs):
            recorder.started(run)
            recorder.ended(ending(run, **({"state": "NONSENSE"} if number == 4 else {})))
        await drained(recorder, 8)
        await asyncio.sleep(1.1)
        assert (recorder.status().failed, recorder.status().recorded) == (1, 8)
    assert [request_of(found) for found in await prefect.runs()] == [
        f"req_{number}" for number in range(9) if number != 4
    ]


async def test_wrong_credentials_are_told(prefect, settings, ending) -> None:
    wrong = Settings.model_validate({**settings.model_dump(), "prefect_auth": "smi:wrong"})
    recorder = SpoolRecorder(wrong)
    await recorder.start()
    run = prefect.run()
    recorder.started(run)
    recorder.ended(ending(run))
    async with asyncio.timeout(20):
        while "credentials (401)" not in recorder.status().error:
            await asyncio.sleep(0.1)
    assert "SMI_PREFECT_AUTH" in recorder.status().error
    assert "wrong" not in recorder.status().error
    begun = time.monotonic()
    await recorder.stop()
    assert time.monotonic() - begun < 8
    assert recorder.folder.exists()  # kept for a recorder that may write


async def test_ctrl_c_leaves_the_recorder_to_its_api(prefect, settings, ending) -> None:
    async with recording(settings) as recorder:
        run = prefect.run()
        recorder.started(run)
        recorder.ended(ending(run))
        async with asyncio.timeout(20):
            while not (recorder.folder / "status.json").exists():
                await asyncio.sleep(0.1)
        os.kill(recorder.process.pid, signal.SIGINT)
        os.kill(recorder.process.pid, signal.SIGHUP)
        await drained(recorder, 1)
    assert recorder.process.returncode == 0
