"""Pipelines over two nodes, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from blocks.settings import load_settings
from tasks.fleet import Fleet
from tasks.protocol.inference_pb2 import UnloadRequest

pytestmark = pytest.mark.timeout(400)  # a killed worker is known to be dead after 15 s, and load adds to it
NODE = ("node", "--pool", "gpu-8gb", "--port", "0", "--memory", "2GiB")
Second = tuple[str, Callable[[], None]]


@pytest.fixture
def second_node(smi: Any, folder: Path) -> Iterator[Second]:
    """A small node of pool gpu-8gb beside the installation's own; its name, and what kills it."""
    home = folder / f"node-{time.time_ns()}"
    home.mkdir()
    shutil.copy(smi.home / "models.toml", home)
    settings = load_settings(home=smi.home)
    environment = {
        **os.environ,
        "SMI_HOME": str(home),
        "SMI_STORAGE_URL": settings.storage,
        "SMI_PREFECT_URL": settings.require("prefect_url"),
        "SMI_PREFECT_AUTH": settings.require("prefect_auth"),
        "SMI_JOIN_TOKEN": settings.require("join_token"),
        "SMI_DATABASE_URL": settings.require("database_url"),
        "SMI_VECTORS_URL": settings.vectors,
    }
    log = home / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments", *NODE],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    until = time.monotonic() + 60
    while not (ready := re.search(r"node (\S+) is ready", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)

    def kill() -> None:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.send_signal(signal.SIGKILL)
        process.wait()

    yield ready[1], kill
    if process.poll() is None:
        kill()


@pytest.fixture
async def fleet(smi: Any, second_node: Second) -> AsyncIterator[Fleet]:
    """The fleet as a process of the installation sees it, once both nodes and both workers are there."""
    fleet = Fleet(load_settings(home=smi.home))
    await fleet.start()
    async with asyncio.timeout(90):
        while len(fleet.nodes) < 2 or second_node[0] not in fleet.nodes:
            await asyncio.sleep(0.1)
    (other,) = fleet.nodes.keys() - {second_node[0]}
    await unload(fleet, other)  # what a test before this one may have left there
    yield fleet
    await fleet.stop()


async def unload(fleet: Fleet, node: str) -> None:
    stub, metadata = fleet.client.stub(node), fleet.client.metadata(node)
    await stub.Unload(UnloadRequest(model="echo-small"), metadata=metadata)


def chat(model: str, content: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"task": "chat", "model": model, "parameters": {"messages": messages}, **more}


async def handed_in(http: httpx.AsyncClient, steps: dict[str, Any]) -> str:
    answer = await http.post("/v1/pipelines", json={"pipeline": {"name": "two nodes", "steps": steps}})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def seen_when(
    http: httpx.AsyncClient, job: str, timeout_s: float, told: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The job once `told` holds of it."""
    seen: dict[str, Any] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while not told(seen := (await http.get(f"/v1/jobs/{job}")).json()):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {json.dumps(seen, indent=1)}") from None
    return seen


def working(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether step `name` has been placed and is running."""
    return lambda job: any(
        step["name"] == name and step["status"] == "running" and step["node"] for step in job["steps"]
    )


def over(job: dict[str, Any]) -> bool:
    return job["status"] in ("succeeded", "failed", "cancelled")


async def steps_of(http: httpx.AsyncClient, job: str) -> dict[str, dict[str, Any]]:
    result = (await http.get(f"/v1/jobs/{job}/result")).raise_for_status().json()
    return dict(result["steps"])


async def test_steps_are_placed_on_both_nodes_and_one_of_a_killed_node_is_done_again_elsewhere(
    http: httpx.AsyncClient, second_node: Second, fleet: Fleet
) -> None:
    small, kill = second_node
    (large,) = fleet.nodes.keys() - {small}
    async with asyncio.timeout(90):  # until the worker of the large node knows the new one, too
        while True:
            probe = await handed_in(http, {"here": chat("echo-large", "x"), "there": chat("echo-small", "x")})
            await seen_when(http, probe, 60, over)
            if (await steps_of(http, probe))["there"]["node"] == small:
                break
            await unload(fleet, large)
    job = await handed_in(
        http,
        {
            "near": chat("echo-small", "one two"),
            "far": chat("echo-large", "three four"),
            "long": chat("echo-small", "${near.text} " + "word " * 100),
            "both": chat("echo-large", "${near.text} ${far.text}"),
            "last": chat("echo-small", "${both.text}", after=["long"]),
        },
    )
    seen = await seen_when(http, job, 60, working("long"))
    await asyncio.sleep(1)
    killed = time.time()
    kill()
    seen = await seen_when(http, job, 120, over)
    assert seen["status"] == "succeeded", seen
    assert seen["attempt"] == 1  # its worker is on the other node
    steps = await steps_of(http, job)
    assert {name: step["node"] for name, step in steps.items()} == {
        "near": small,
        "far": large,
        "both": large,
        "long": large,
        "last": large,
    }
    assert {name: step["attempts"] for name, step in steps.items()} == {
        "near": 1,
        "far": 1,
        "both": 1,
        "long": 2,
        "last": 1,
    }
    assert steps["near"]["ended_at"] < killed
    assert steps["long"]["result"]["text"].split() == ["one", "two", *["word"] * 100]
    assert steps["last"]["result"]["text"] == "one two three four"


@pytest.mark.slow
async def test_another_attempt_of_the_job_does_only_what_its_killed_worker_left(
    http: httpx.AsyncClient, prefect: httpx.AsyncClient, second_node: Second, fleet: Fleet
) -> None:
    small, kill = second_node
    (large,) = fleet.nodes.keys() - {small}
    async with asyncio.timeout(90):  # until the jobs processor knows the new node, too
        while True:
            probe = await handed_in(http, {"probe": chat("echo-small", "x")})
            if await worker_of(http, prefect, probe) == small:
                break
            await seen_when(http, probe, 60, over)
            await unload(fleet, large)
    await seen_when(http, probe, 60, over)
    job = await handed_in(
        http,
        {
            "first": chat("echo-small", "one two"),
            "long": chat("echo-small", "${first.text} " + "word " * 100),
            "last": chat("echo-small", "${long.text}"),
        },
    )
    await seen_when(http, job, 60, working("long"))
    first = (await http.get(f"/v1/jobs/{job}/steps/first")).raise_for_status().json()
    assert await worker_of(http, prefect, job) == small
    kill()
    seen = await seen_when(http, job, 180, over)
    assert seen["status"] == "succeeded", seen
    assert seen["attempt"] == 2
    steps = await steps_of(http, job)
    assert steps["first"] == first  # done once, by the first attempt
    assert [steps[name]["node"] for name in ("first", "long", "last")] == [small, large, large]
    assert steps["last"]["result"]["text"].split() == ["one", "two", *["word"] * 100]


async def worker_of(http: httpx.AsyncClient, prefect: httpx.AsyncClient, job: str) -> str:
    """The node whose worker has taken the job's run."""
    seen = await seen_when(http, job, 60, lambda job: job["flow_run_id"] is not None)
    async with asyncio.timeout(60):
        while True:
            run = (await prefect.get(f"/flow_runs/{seen['flow_run_id']}")).raise_for_status().json()
            if run["infrastructure_pid"]:
                return str(run["infrastructure_pid"])
            await asyncio.sleep(0.2)
