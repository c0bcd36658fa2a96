"""Imported once, by a node's forkserver: what every runner needs, and what each installed driver names.

A runner then starts in tens of milliseconds and shares these modules' memory with its siblings.
"""

from __future__ import annotations

import gc
import importlib
import logging
from importlib.metadata import entry_points

import deployments.node.runner  # noqa: F401
from deployments.node.plugins import ADAPTERS, DRIVERS

log = logging.getLogger("smi.node")


def _modules() -> list[str]:
    modules = [entry.module for group in (DRIVERS, ADAPTERS) for entry in entry_points(group=group)]
    for entry in entry_points(group=DRIVERS):
        try:
            modules += entry.load().preload
        except Exception as error:  # noqa: BLE001 (one broken package must not stop every other runner)
            log.debug("driver %s is not preloaded: %s", entry.name, type(error).__name__)
    return modules


for module in dict.fromkeys(_modules()):
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (said again, in full, where a model needs the module)
        log.debug("%s is not preloaded: %s", module, type(error).__name__)
gc.freeze()  # collections leave these pages shared
