"""The API's side of the record: cheap, bounded, and it never raises into a request."""

import asyncio
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import orjson
import pytest

from blocks.settings import Settings, load_settings
from deployments.recorder.journal import BATCH_LINES, Journal
from deployments.recorder.segments import API_LOCK, Segments, held
from deployments.recorder.spool import SpoolRecorder
from deployments.recorder.writer import Writer, adopt
from tasks.live import LiveRun


def journal_of(folder: Path) -> Journal:
    journal = Journal.claim(folder)
    assert journal is not None
    return journal


def opened(recorder: SpoolRecorder) -> Segments:
    """The recorder's spool, opened without a process that would empty it."""
    recorder._segments.open()
    return recorder._segments


async def test_a_record_costs_microseconds(settings, ending: Callable[..., LiveRun]) -> None:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    runs = [ending(LiveRun("chat", f"req_{number}")) for number in range(2000)]
    begun = time.perf_counter()
    for run in runs:
        recorder.started(run)
        recorder.ended(run)
    each = (time.perf_counter() - begun) / len(runs) * 1e6
    segments.close()
    print(f"started() and ended(), with their writes to disk: {each:.1f} us")  # noqa: T201
    assert each < 500
    assert recorder.status().backlog == 4000


async def test_lines_reach_the_disk_within_a_moment(settings) -> None:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    recorder.started(LiveRun("chat", "req_1"))
    await asyncio.sleep(0.2)
    assert b"req_1" in (recorder.folder / "00000001.jsonl").read_bytes()
    segments.close()


async def test_beyond_the_bound_runs_are_dropped_and_counted(
    settings, ending: Callable[..., LiveRun]
) -> None:
    recorder = SpoolRecorder(settings, limit=20_000, segment=4_000)
    segments = opened(recorder)
    runs = [LiveRun("chat", f"req_{number}") for number in range(1000)]
    for run in runs:
        recorder.started(run)
        recorder.ended(ending(run))
        await asyncio.sleep(0)
    segments.close()
    on_disk = sum(path.stat().st_size for path in recorder.folder.glob("*.jsonl"))
    dropped = recorder.status().dropped
    assert 20_000 <= on_disk < 21_000
    assert dropped > 0
    journal, kept = journal_of(recorder.folder), []
    while batch := journal.take(dead=True):
        kept += batch.over
    assert [run.request_id for run in kept] == [f"req_{number}" for number in range(1000 - dropped)]
    assert all(run.state == "COMPLETED" for run in kept)
    journal.close()


async def test_room_made_by_the_recorder_is_used_again(settings, ending: Callable[..., LiveRun]) -> None:
    recorder = SpoolRecorder(settings, limit=3_000, segment=1_000)
    segments = opened(recorder)
    while not segments.full:
        run = LiveRun("chat", "req")
        recorder.started(run)
        recorder.ended(ending(run))
        segments._flush()
    journal = journal_of(recorder.folder)
    while journal.take(dead=False):
        journal.commit()
    segments._counted = 0.0
    assert not segments.full
    segments.close()
    journal.close()


async def test_a_disk_that_refuses_loses_nothing(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    file, segments._file = segments._file, -1  # as a disk that refuses: EBADF
    recorder.started(LiveRun("chat", "req_1"))
    segments._flush()
    recorder.started(LiveRun("chat", "req_2"))
    segments._file = file
    segments._flush()
    text = (recorder.folder / "00000001.jsonl").read_text()
    assert [line.split(",")[2] for line in text.splitlines()] == ['"req_1"', '"req_2"']
    segments.close()


async def test_a_torn_last_line_is_passed_over(settings, ending: Callable[..., LiveRun]) -> None:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    for number in range(3):
        run = LiveRun("chat", f"req_{number}")
        recorder.started(run)
        recorder.ended(ending(run))
    segments.close()
    path = recorder.folder / "00000001.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    journal = journal_of(recorder.folder)
    assert [run.request_id for run in journal.take(dead=True).over] == ["req_0", "req_1"]
    crashed = journal.take(dead=True).over
    assert [(run.request_id, run.state) for run in crashed] == [("req_2", "CRASHED")]
    assert not journal.take(dead=True)
    journal.close()


async def test_a_journal_goes_on_at_its_checkpoint(settings, ending: Callable[..., LiveRun]) -> None:
    recorder = SpoolRecorder(settings, segment=10_000)
    segments = opened(recorder)
    first = LiveRun("chat", "req_first")
    recorder.started(first)
    for number in range(500):
        run = LiveRun("chat", f"req_{number}")
        recorder.started(run)
        recorder.ended(ending(run))
        segments._flush()
    recorder.ended(ending(first))
    segments.close()
    seen: list[str] = []
    while True:
        journal = journal_of(recorder.folder)  # each batch by a recorder that has just started
        batch = journal.take(dead=True)
        seen += [run.request_id for run in batch.over]
        journal.commit()
        journal.close()
        if not batch:
            break
        assert len(batch.over) <= BATCH_LINES
    assert seen == [*(f"req_{number}" for number in range(500)), "req_first"]
    assert len(list(recorder.folder.glob("*.jsonl"))) == 1


async def test_one_recorder_at_a_time_has_a_spool(settings) -> None:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    assert held(recorder.folder / API_LOCK)
    journal = journal_of(recorder.folder)
    assert Journal.claim(recorder.folder) is None
    journal.close()
    segments.close()
    assert not held(recorder.folder / API_LOCK)
    journal_of(recorder.folder).remove()
    assert not recorder.folder.exists()


@pytest.fixture
def alone(tmp_path: Path) -> Settings:
    """Settings of a recorder whose Prefect is not there."""
    return load_settings(home=tmp_path, prefect_url="http://127.0.0.1:9/api", prefect_auth="smi:none")


def dead_spool(settings: Settings, run: LiveRun) -> Path:
    recorder = SpoolRecorder(settings)
    segments = opened(recorder)
    recorder.started(run)
    recorder.ended(run)
    segments.close()
    return recorder.folder


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("failed"),
        lambda state: state["open"][0].update(colour="red"),
        lambda state: state["open"][0].pop("flow"),
        lambda state: state.update(offset=None),
    ],
)
async def test_a_checkpoint_of_another_version_is_read_again_from_the_start(
    alone, change: Callable[..., None]
) -> None:
    recorder = SpoolRecorder(alone)
    segments = opened(recorder)
    recorder.started(LiveRun("chat", "req_1"))
    segments.close()
    journal = journal_of(recorder.folder)
    journal.take(dead=False)
    journal.commit()
    journal.close()
    path = recorder.folder / "checkpoint.json"
    state = orjson.loads(path.read_bytes())
    change(state)
    path.write_bytes(orjson.dumps(state))
    again = journal_of(recorder.folder)
    assert (again.lines, again.offset, again.open) == (0, 0, {})
    again.take(dead=False)
    assert [run.request_id for run in again.open.values()] == ["req_1"]
    again.close()


async def test_a_dead_spool_that_cannot_be_written_is_put_aside(alone, eventually) -> None:
    bad, good = SpoolRecorder(alone), SpoolRecorder(alone)
    for recorder in (bad, good):
        opened(recorder).close()
    (bad.folder / "oops.jsonl").touch()  # no recorder of ours makes such a name
    spools = bad.folder.parent

    async def gone() -> bool:
        return not bad.folder.exists() and not good.folder.exists()

    async with httpx.AsyncClient() as http:
        task = asyncio.create_task(adopt(spools, http))
        await eventually(gone)
        task.cancel()
    assert [path.name for path in spools.iterdir()] == ["damaged"]
    assert (spools / "damaged" / bad.folder.name / "oops.jsonl").exists()


async def test_an_odd_answer_of_prefect_is_told_and_tried_again(
    alone, ending: Callable[..., LiveRun], eventually
) -> None:
    asked: list[bytes] = []

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b" ", 2)[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(odd, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    journal = journal_of(dead_spool(alone, ending(LiveRun("chat", "req_1"))))
    dead = asyncio.Event()
    dead.set()

    async def twice() -> bool:
        return asked.count(b"/flows/") > 1

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http, server:
        writer = Writer(journal, http)
        task = asyncio.create_task(writer.follow(dead))
        await eventually(twice)
        assert not task.done()
        task.cancel()
    assert writer.error == "Prefect's answer is not understood: KeyError('id')"
    journal.close()


async def test_a_recorder_that_cannot_be_forked_is_started_later(alone, eventually) -> None:
    recorder = SpoolRecorder(alone)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await recorder.start()
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # EMFILE for the child's pipe
    try:
        await asyncio.sleep(0.5)
        assert recorder.process is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "keeps ending" in recorder.status().error

    async def runs() -> bool:
        return recorder.process is not None and recorder.process.returncode is None

    await eventually(runs)
    await recorder.stop()


async def test_a_recorder_that_keeps_ending_is_told(alone, eventually) -> None:
    recorder = SpoolRecorder(alone)
    await recorder.start()
    assert recorder.status().error == ""
    (recorder.folder / "recorder.lock").mkdir()  # so it ends as soon as it begins

    async def told() -> bool:
        return "keeps ending" in recorder.status().error

    await eventually(told)
    await recorder.stop()


async def test_a_recorder_that_says_nothing_for_long_is_told(alone) -> None:
    recorder = SpoolRecorder(alone)
    segments = opened(recorder)
    said = {"lines": 0, "recorded": 0, "failed": 0, "oldest": 0.0, "lag_s": 0.0, "error": ""}
    status = recorder.folder / "status.json"
    status.write_bytes(orjson.dumps({**said, "time": time.time()}))
    assert recorder.status().error == ""
    status.write_bytes(orjson.dumps({**said, "time": time.time() - 60}))
    assert recorder.status().error == "the recorder's process has said nothing for 60 s"
    segments.close()


async def test_a_run_that_is_cancelled_while_the_api_stops_is_recorded(
    alone, ending: Callable[..., LiveRun]
) -> None:
    recorder = SpoolRecorder(alone)
    await recorder.start()
    run = LiveRun("chat", "req_1")
    recorder.started(run)
    asyncio.get_running_loop().call_later(
        0.1, lambda: recorder.ended(ending(run, state="CANCELLED", message="the client left"))
    )
    await recorder.stop()
    journal = journal_of(recorder.folder)
    assert [over.state for over in journal.take(dead=True).over] == ["CANCELLED"]
    journal.close()
