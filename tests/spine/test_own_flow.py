"""A user's own Prefect flow that imports our tasks, run as its user would run it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent.parent
FLOW = HERE / "examples" / "minutes.py"
SPEECH = HERE / "data" / "speech"


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


async def test_a_flow_of_ones_own_uses_our_steps(
    smi: Any, smi_command: Callable[..., subprocess.CompletedProcess[str]], prefect: httpx.AsyncClient
) -> None:
    exported = smi_command("env", "--home", str(smi.home))
    assert exported.returncode == 0, exported.stderr
    script = f"{exported.stdout}\ncd {HERE.parent}\n{sys.executable} {FLOW} {SPEECH / 'austen-0870.wav'}"
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = words((SPEECH / "austen-0870.txt").read_text())
    quoted = words(done.stdout.partition("\n> ")[2].replace("Mr.", "mister"))
    assert quoted == said
    flows = {"flows": {"name": {"any_": ["minutes"]}}}
    (run,) = (await prefect.post("/flow_runs/filter", json=flows)).json()
    assert run["state_type"] == "COMPLETED"
    tasks = await prefect.post("/task_runs/filter", json={"flow_runs": {"id": {"any_": [run["id"]]}}})
    names = {task["name"].rpartition("-")[0] for task in tasks.json()}
    assert {"hear", "generate", "dispatch"} <= names
