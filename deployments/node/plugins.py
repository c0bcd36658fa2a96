"""Drivers and adapters by entry point: a third party adds one without touching our files."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from blocks.errors import LoadFailed
from deployments.node.adapters.base import Adapter
from deployments.node.drivers.base import Driver

DRIVERS = "smi.drivers"
ADAPTERS = "smi.adapters"


def driver_class(name: str) -> type[Driver]:
    """The driver that the catalogue calls `name`. Raises `LoadFailed` with the cure."""
    kind = _named(DRIVERS, name)
    if not (isinstance(kind, type) and issubclass(kind, Driver)):
        raise LoadFailed(f"entry point {name!r} of {DRIVERS} is not a Driver")
    return kind


def adapter_class(task: str) -> type[Adapter[Any, Any]]:
    """The adapter of `task`. Raises `LoadFailed` with the cure."""
    kind = _named(ADAPTERS, task)
    if not (isinstance(kind, type) and issubclass(kind, Adapter)):
        raise LoadFailed(f"entry point {task!r} of {ADAPTERS} is not an Adapter")
    return kind


def _named(group: str, name: str) -> object:
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except ImportError as error:
            raise LoadFailed(f"{group} {name!r} needs a package that is not installed ({error})") from error
    known = ", ".join(sorted(entry_points(group=group).names))
    raise LoadFailed(f"no installed package offers {name!r} in {group}; there are: {known}")
