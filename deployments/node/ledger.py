"""How much memory a node may use and what it has promised. A promise is made when a load starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from blocks.errors import OutOfMemory

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARE = 0.8


class Ledger:
    """A budget in bytes, less reservations by model.

    Example:
        >>> ledger = Ledger(100)
        >>> ledger.reserve("a", 60), ledger.reserve("b", 60)
        (True, False)
        >>> ledger.release("a")
        >>> ledger.reserve("b", 60)
        True
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._reserved: dict[str, int] = {}

    @property
    def reserved(self) -> int:
        return sum(self._reserved.values())

    @property
    def free(self) -> int:
        return self.total - self.reserved

    def reserve(self, model: str, size: int) -> bool:
        """Whether `size` bytes were free and are now `model`'s. A model has one reservation."""
        if model in self._reserved:
            raise ValueError(f"{model} has a reservation already")
        if size > self.free:
            return False
        self._reserved[model] = size
        return True

    def release(self, model: str) -> None:
        """Give back what `model` has, if anything."""
        self._reserved.pop(model, None)

    def victims(self, model: str, size: int, idle: Sequence[str]) -> list[str]:
        """The first of `idle` (least recently used first) whose end makes room for `size` bytes.

        Raises:
            OutOfMemory: all of them together would not; names need, free, and what is loaded.
        """
        chosen: list[str] = []
        room = self.free
        for name in idle:
            if room >= size:
                break
            room += self._reserved.get(name, 0)
            chosen.append(name)
        if room < size:
            raise OutOfMemory(
                f"{model} needs {gib(size)}; {gib(self.free)} of {gib(self.total)} are free and "
                f"{_listed(self._reserved)}; nothing more is idle",
                retry_after=5 if size <= self.total else None,
            )
        return chosen


def _listed(reserved: Mapping[str, int]) -> str:
    if not reserved:
        return "nothing is loaded"
    return "loaded are " + ", ".join(f"{name} ({gib(size)})" for name, size in reserved.items())


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def default_memory() -> int:
    """80 % of this machine's memory, or of what its control group allows, in bytes."""
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return int(total * SHARE)
