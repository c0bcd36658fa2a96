"""Which machine this is."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Equal for processes of one running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
