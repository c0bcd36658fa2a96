"""The API's side of the record: cheap, bounded, and it never raises into a request."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.recorder.journal import BATCH_LINES, Journal
from deployments.recorder.segments import API_LOCK, Segments, held
from deployments.recorder.spool import SpoolRecorder
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
