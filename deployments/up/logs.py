"""`smi logs`: the ends of the log files, and what comes after."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from blocks.errors import InvalidRequest

POLL_S = 0.2


def show(folder: Path, name: str | None, lines: int, follow: bool, out: Callable[[str], None]) -> None:
    """Print the last `lines` of one log or of all, then, with `follow`, lines as they come.

    Raises:
        InvalidRequest: there is no such log, with the names there are; or none at all.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found:
        raise InvalidRequest(f"no logs in {folder}: nothing was started there; --home names another folder")
    if name is not None and name not in found:
        raise InvalidRequest(f"no log {name!r} in {folder}; there are: {', '.join(found)}")
    chosen = found if name is None else {name: found[name]}
    ends = {}
    for label, path in chosen.items():
        text = path.read_text(errors="replace")
        ends[label] = path.stat().st_size
        for line in text.splitlines()[-lines:] if lines else []:
            out(_marked(label, line, len(chosen)))
    while follow:
        for label, path in chosen.items():
            ends[label] = _more(label, path, ends[label], len(chosen), out)
        time.sleep(POLL_S)


def _more(label: str, path: Path, end: int, logs: int, out: Callable[[str], None]) -> int:
    size = path.stat().st_size
    if size < end:  # a new file was begun
        end = 0
    with path.open("rb") as file:
        file.seek(end)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        out(_marked(label, line, logs))
    return end + len(whole)


def _marked(label: str, line: str, logs: int) -> str:
    return line if logs == 1 else f"{label:<9} {line}"
