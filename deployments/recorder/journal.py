"""One API's spool as the recorder reads it: in order, from a checkpoint, each line once.

A batch is written to Prefect before the checkpoint moves past it. A recorder that is killed in between
writes the batch again: under the same keys, so nothing is doubled.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from deployments.recorder.lines import Record, parse
from deployments.recorder.segments import lock, segment_path
from tasks.live import StepRecord

BATCH_LINES = 256
READ_BYTES = 256 * 1024
SETTLE_S = 0.5  # a run that is over within this time is written once, else first as running
CRASHED = "the API process ended before this run did"

log = logging.getLogger("smi.recorder")


@dataclass(slots=True)
class Batch:
    """What is to be written next: runs that are over, and runs to be shown as running."""

    over: list[Record] = field(default_factory=list)
    running: list[Record] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.over or self.running)

    @property
    def oldest(self) -> float:
        """When the first of it became due, seconds since the epoch."""
        return min([run.ended for run in self.over] + [run.started + SETTLE_S for run in self.running])


class Journal:
    """A spool, its position and the runs that go on there.

    Attributes:
        name: unique to one API process.
        open: started and not ended, by key.
        lines, committed: lines taken; lines behind the checkpoint.
        recorded, failed: runs written; runs that were damaged or refused.
    """

    def __init__(self, folder: Path, lock_fd: int) -> None:
        self.folder, self._lock = folder, lock_fd
        self.name = folder.name
        self.segment, self.offset = 1, 0
        self.open: dict[int, Record] = {}
        self.lines = self.committed = self.recorded = self.failed = 0
        self._resume()

    @classmethod
    def claim(cls, folder: Path) -> Journal | None:
        """The journal of `folder`, or None while another recorder works on it."""
        try:
            descriptor = lock(folder / "recorder.lock")
        except FileNotFoundError:
            return None
        return None if descriptor is None else cls(folder, descriptor)

    def take(self, dead: bool) -> Batch:
        """The next batch; empty when there is nothing to do now.

        Args:
            dead: the API has ended: runs that are still open after the last line have crashed.
        """
        batch = Batch()
        lines = self._read()
        self.lines += len(lines)
        for line in lines:
            self._apply(line, batch)
        if len(lines) == BATCH_LINES:
            return batch
        if dead and not lines:
            ended = self._last_written()
            for run in self.open.values():
                run.state, run.message, run.ended = "CRASHED", CRASHED, max(run.started, ended)
            batch.over.extend(self.open.values())
            self.open.clear()
        elif not dead:
            late = time.time() - SETTLE_S
            batch.running = [r for r in self.open.values() if r.flow_run_id is None and r.started < late]
        return batch

    def waiting(self) -> int:
        """Bytes that are not taken yet."""
        sizes = [segment_path(self.folder, n).stat().st_size for n in self._numbers() if n >= self.segment]
        return sum(sizes) - self.offset

    def commit(self) -> None:
        """Move the checkpoint behind what was taken, and delete segments that lie before it."""
        state = {
            "segment": self.segment,
            "offset": self.offset,
            "lines": self.lines,
            "recorded": self.recorded,
            "failed": self.failed,
            "open": [asdict(run) for run in self.open.values()],
        }
        replace(self.folder / "checkpoint.json", orjson.dumps(state))
        self.committed = self.lines
        for number in self._numbers():
            if number < self.segment:
                segment_path(self.folder, number).unlink()

    def close(self) -> None:
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the spool: its API is dead and all of it is written."""
        shutil.rmtree(self.folder)
        self.close()

    def _resume(self) -> None:
        try:
            state = orjson.loads((self.folder / "checkpoint.json").read_bytes())
            names = ("segment", "offset", "lines", "recorded", "failed")
            segment, offset, lines, recorded, failed = (int(state[name]) for name in names)
            runs = {
                run["key"]: Record(**{**run, "steps": [StepRecord(**step) for step in run["steps"]]})
                for run in state["open"]
            }
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError):  # a power cut, another version; nothing is doubled
            log.warning("the checkpoint of %s cannot be read; going on from its start", self.folder)
            return
        self.segment, self.offset, self.open = segment, offset, runs
        self.lines = self.committed = lines
        self.recorded, self.failed = recorded, failed

    def _apply(self, line: bytes, batch: Batch) -> None:
        try:
            run = parse(line)
        except ValueError as error:
            self.failed += 1
            log.error("a damaged line in %s is passed over: %s", self.folder, error)
            return
        if not run.over:
            self.open[run.key] = run
            return
        known = self.open.pop(run.key, None)
        run.flow_run_id = known.flow_run_id if known else None
        batch.over.append(run)

    def _read(self) -> list[bytes]:
        """Up to `BATCH_LINES` whole lines; moves on to the next segment where one is finished."""
        lines: list[bytes] = []
        numbers = self._numbers()
        if not numbers:
            return lines
        last = numbers[-1]  # looked up first: a later segment means that this one is finished
        if self.segment < numbers[0]:
            self.segment, self.offset = numbers[0], 0
        while len(lines) < BATCH_LINES:
            with segment_path(self.folder, self.segment).open("rb") as file:
                file.seek(self.offset)
                data = file.read(READ_BYTES)
                if b"\n" not in data:
                    data += file.read()
            whole = data.split(b"\n")[:-1][: BATCH_LINES - len(lines)]
            self.offset += sum(len(line) + 1 for line in whole)
            lines += whole
            if not whole and self.segment < last:
                self.segment, self.offset = self.segment + 1, 0
            elif not whole:
                break
        return lines

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.jsonl"))

    def _last_written(self) -> float:
        path = segment_path(self.folder, self.segment)
        return path.stat().st_mtime if path.exists() else 0.0


def replace(path: Path, data: bytes) -> None:
    """Write `data` so that readers see all of it or what was there before."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)
