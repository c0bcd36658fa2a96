"""The spool's files as the API writes them: appended, rotated, bounded.

A spool is a folder of one API process: `00000001.jsonl`, ... beside `api.lock`, which that process holds
for as long as it lives, whatever way it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from pathlib import Path

API_LOCK = "api.lock"
FLUSH_S = 0.05
RETRY_S = 1.0
FLUSH_BYTES = 64 * 1024
PENDING_BYTES = 8 * 1024 * 1024  # held in memory while the disk refuses

log = logging.getLogger("smi.recorder")


def lock(path: Path) -> int | None:
    """A descriptor that holds the lock at `path`, or None where another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def held(path: Path) -> bool:
    """Whether a process holds the lock at `path`; a path that is not there is not held."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.jsonl"


class Segments:
    """Appends lines to a new spool below `spools`, at most `limit` bytes in all spools together."""

    def __init__(self, spools: Path, limit: int, segment: int) -> None:
        self.folder = spools / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        self._limit, self._segment = limit, segment
        self._lock: int | None = None
        self._file: int | None = None
        self._number = 0
        self._size = 0  # of the current segment
        self._total = 0  # of all spools, as last counted, and what was written since
        self._counted = 0.0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Create the folder. It is hidden until it is locked: recorders take unlocked ones for dead."""
        hidden = self.folder.with_name(f".{self.folder.name}")
        hidden.mkdir(parents=True, mode=0o700)
        self._lock = lock(hidden / API_LOCK)
        hidden.rename(self.folder)
        self._rotate()

    def close(self) -> None:
        self._flush()
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    @property
    def full(self) -> bool:
        """Whether nothing more should be begun: the bound is reached, the disk refuses, or it is closed."""
        if self._file is None or self._pending_bytes > PENDING_BYTES:
            return True
        if self._total + self._pending_bytes < self._limit:
            return False
        if time.monotonic() - self._counted > RETRY_S:
            self._count()
        return self._total + self._pending_bytes >= self._limit

    def append(self, line: bytes) -> None:
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
        elif self._pending_bytes > FLUSH_BYTES and not self._refused:
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending or self._file is None:
            return
        data = b"".join(self._pending)
        try:
            if self._size >= self._segment:
                self._rotate()
            written = os.write(self._file, data)
        except OSError as error:
            log.error("the spool of live runs cannot be written (%s); trying again", error.strerror)
            written = 0
        self._size += written
        self._total += written
        rest = data[written:]
        self._pending, self._pending_bytes = [rest] if rest else [], len(rest)
        self._refused = bool(rest)
        if rest:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._flush)

    def _rotate(self) -> None:
        path = segment_path(self.folder, self._number + 1)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file, self._number, self._size = file, self._number + 1, 0
        self._count()

    def _count(self) -> None:
        """Bytes of all spools. Recorders delete what they wrote, also while this counts."""
        total = 0
        for path in self.folder.parent.glob("*/*.jsonl"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        self._total, self._counted = total, time.monotonic()
