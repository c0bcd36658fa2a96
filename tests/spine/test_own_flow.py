"""A user's own Prefect flow that imports our tasks, run as its user would run it."""

from __future__ import annotations

import asyncio
import json
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


TWICE = """
import asyncio, json
from prefect import flow
from flows.pipeline import PipelineRequest, pipeline
from tasks.audio import say
from tasks.fleet import current_fleet
from tasks.protocol.shapes import SpeechParameters

def spoken(text):
    return SpeechParameters(input=text, response_format="wav")

async def both():
    return await asyncio.gather(say("", spoken("One.")), say("", spoken("One, two, three, four.")))

def steps(text):
    step = {"task": "speak", "parameters": {"input": text, "response_format": "wav"}}
    return PipelineRequest.model_validate({"pipeline": {"name": "a", "steps": {"talk": step}}})

@flow
async def twice():
    said = await both()
    for text in ("Five.", "Six, seven, eight, nine."):
        said.append((await pipeline.fn(steps(text))).steps["talk"].result)
    said.append((await pipeline(steps("Ten."))).steps["talk"].result)
    return said

async def main():
    said = [*await twice(), *await both()]
    storage = (await current_fleet()).storage
    sounds = [one.audio for one in said]
    print(json.dumps([[made.reference, made.size, len(storage.read(made.reference))] for made in sounds]))

asyncio.run(main())
"""


async def test_what_a_flow_of_ones_own_makes_lies_apart_and_is_linked_nowhere(
    smi: Any, smi_command: Callable[..., subprocess.CompletedProcess[str]], prefect: httpx.AsyncClient
) -> None:
    exported = smi_command("env", "--home", str(smi.home))
    script = f"{exported.stdout}\ncd {HERE.parent}\n{sys.executable} -c '{TWICE}'"
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", script], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert len({reference for reference, _, _ in made}) == len(made) == 7
    assert all(size == stored for _, size, stored in made)
    runs = [reference.split("/")[1] for reference, _, _ in made]
    own, inner = runs[0], runs[4]
    assert runs == [own] * 4 + [inner] + ["script"] * 2
    assert (await prefect.get(f"/flow_runs/{own}")).json()["state_type"] == "COMPLETED"
    shown = {"artifacts": {"flow_run_id": {"any_": [own, inner]}}}
    linked = (await prefect.post("/artifacts/filter", json=shown)).raise_for_status()
    assert not [found for found in linked.json() if "/files/" in str(found["data"])]
