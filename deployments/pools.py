"""Prefect's work pools and deployments, as SMI needs them. All calls may be repeated at any time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from blocks.errors import ConfigurationError, Unavailable
from blocks.settings import Settings
from tasks.fleet import POOL_TYPE
from tasks.prefect_api import prefect_http

ROOT = Path(__file__).resolve().parent.parent
POOLS = {"cpu": 0, "gpu-8gb": 8, "gpu-24gb": 24, "gpu-80gb": 80, "hpc": 0}  # GB of GPU memory
NO_GPU = {"cpu": "nodes without a GPU", "hpc": "nodes inside an institution's HPC cluster"}
PREFECTS_QUEUE = "default"  # every pool has it, and nothing of ours uses it
QUEUES = {"high": 1, "normal": 2, "low": 3}  # Prefect: 1 goes first
RUNS_PER_NODE = 4  # flow runs that a node's worker takes at once
DEPLOY_TIMEOUT_S = 120
BEGINNING_S = 60  # a server that has just begun, on a machine where all begins, may take so long to answer
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
PAGE = 200


@dataclass(frozen=True)
class Pool:
    """A pool as Prefect knows it. `queues` of ours by name, 1 goes first; `nodes` are those online."""

    name: str
    gpu_memory_gb: int
    queues: dict[str, int]
    nodes: list[str]


async def ensure_pools(settings: Settings) -> None:
    """Make the pools and queues that are missing, and set right those that differ.

    Raises:
        httpx.HTTPError: Prefect is away or refuses.
    """
    async with prefect_http(settings, BEGINNING_S) as http:
        for name, memory in POOLS.items():
            await _ensure(http, name, memory)


async def add_pool(settings: Settings, name: str, gpu_memory_gb: int) -> bool:
    """Make a pool with its three queues. Whether it is new: repeating it is no error.

    Raises:
        ConfigurationError: the name is not one for a pool, or there is such a pool with other memory.
        Unavailable: Prefect is away.
    """
    if NAME.fullmatch(name) is None or name.startswith("prefect"):
        raise ConfigurationError(
            f"{name!r} is no name for a pool: 1 to 63 of a-z, 0-9 and '-', a letter first, not 'prefect...'"
        )
    async with _reached(settings) as http:
        found = await http.get(f"/work_pools/{name}")
        if found.is_success and (there := _memory(found.json())) != gpu_memory_gb:
            raise ConfigurationError(
                f"pool {name!r} exists already, with {there} GB of GPU memory, not {gpu_memory_gb}: "
                "choose another name"
            )
        await _ensure(http, name, gpu_memory_gb)
    return not found.is_success


async def list_pools(settings: Settings) -> list[Pool]:
    """The pools that nodes can join, with the nodes that Prefect has heard lately.

    Raises:
        Unavailable: Prefect is away.
    """
    async with _reached(settings) as http:
        answer = await http.post("/work_pools/filter", json={"limit": PAGE})
        pools = []
        for pool in answer.raise_for_status().json():
            if pool["type"] != POOL_TYPE:
                continue
            path = f"/work_pools/{pool['name']}"
            queues = (await http.post(f"{path}/queues/filter", json={})).raise_for_status().json()
            workers = (await http.post(f"{path}/workers/filter", json={})).raise_for_status().json()
            pools.append(
                Pool(
                    name=pool["name"],
                    gpu_memory_gb=_memory(pool),
                    queues={
                        queue["name"]: queue["priority"]
                        for queue in sorted(queues, key=lambda queue: int(queue["priority"]))
                        if queue["name"] != PREFECTS_QUEUE
                    },
                    nodes=sorted(worker["name"] for worker in workers if worker["status"] == "ONLINE"),
                )
            )
    return sorted(pools, key=lambda pool: (pool.gpu_memory_gb, pool.name))


async def check_pool(settings: Settings, name: str) -> None:
    """See that a node can join pool `name`. While Prefect is away nobody knows, and the node may begin.

    Raises:
        ConfigurationError: there is no such pool; with how to make it.
    """
    if name in POOLS:  # `smi up` makes these beside its node
        return
    async with prefect_http(settings) as http:
        try:
            found = await http.get(f"/work_pools/{name}")
        except httpx.HTTPError:
            return
    if found.status_code == httpx.codes.NOT_FOUND:
        raise ConfigurationError(
            f"pool {name!r} does not exist; make it with `smi pools add {name} --gpu-memory-gb N`, "
            "or see `smi pools` for those there are"
        )


def _memory(pool: dict[str, Any]) -> int:
    """GB of GPU memory that a pool's nodes have; 0 if it does not say."""
    variables = pool["base_job_template"].get("variables", {}).get("properties", {})
    return int(variables.get("gpu_memory_gb", {}).get("default") or 0)


@asynccontextmanager
async def _reached(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Prefect's API, with what is wrong with it in words."""
    async with prefect_http(settings) as http:
        try:
            yield http
        except httpx.HTTPStatusError as error:
            raise Unavailable(f"Prefect at {http.base_url} answered {error.response.status_code}") from None
        except httpx.HTTPError as error:
            raise Unavailable(
                f"Prefect at {http.base_url} does not answer ({type(error).__name__}): is `smi up` running?"
            ) from None


async def _ensure(http: httpx.AsyncClient, name: str, gpu_memory_gb: int) -> None:
    """Make a pool and its queues, or set them right."""
    await _ensure_pool(http, name, gpu_memory_gb)
    for queue, priority in QUEUES.items():
        await _ensure_queue(http, name, queue, priority)


async def _ensure_pool(http: httpx.AsyncClient, name: str, gpu_memory_gb: int) -> None:
    with_gpu = f"nodes with {gpu_memory_gb} GB of GPU memory"
    wanted = {
        "description": with_gpu if gpu_memory_gb else NO_GPU.get(name, NO_GPU["cpu"]),
        "base_job_template": _template(gpu_memory_gb),
    }
    found = await http.get(f"/work_pools/{name}")
    if found.status_code == httpx.codes.NOT_FOUND:
        made = await http.post("/work_pools/", json={"name": name, "type": POOL_TYPE, **wanted})
        if made.status_code != httpx.codes.CONFLICT:  # another process was faster
            made.raise_for_status()
        return
    pool = found.raise_for_status().json()
    if pool["type"] != POOL_TYPE:
        raise ConfigurationError(
            f"work pool {name!r} is of type {pool['type']!r}, not {POOL_TYPE!r}: rename or delete it"
        )
    if any(pool[field] != value for field, value in wanted.items()):
        (await http.patch(f"/work_pools/{name}", json=wanted)).raise_for_status()


def _template(gpu_memory_gb: int) -> dict[str, Any]:
    memory = {
        "type": "integer",
        "title": "Gpu Memory Gb",
        "default": gpu_memory_gb,
        "description": "GPU memory of a node in this pool; 0 means none",
    }
    return {
        "job_configuration": {"gpu_memory_gb": "{{ gpu_memory_gb }}"},
        "variables": {"type": "object", "properties": {"gpu_memory_gb": memory}},
    }


async def _ensure_queue(http: httpx.AsyncClient, pool: str, name: str, priority: int) -> None:
    path = f"/work_pools/{pool}/queues"
    found = await http.get(f"{path}/{name}")
    if found.status_code == httpx.codes.NOT_FOUND:
        made = await http.post(path, json={"name": name, "priority": priority})
        if made.status_code != httpx.codes.CONFLICT:
            made.raise_for_status()
        # Prefect may shift priorities to make room for a new queue.
        found = await http.get(f"{path}/{name}")
    if found.raise_for_status().json()["priority"] != priority:
        (await http.patch(f"{path}/{name}", json={"priority": priority})).raise_for_status()


async def ensure_deployments(settings: Settings) -> None:
    """Deploy `prefect.yaml`, unless neither it nor a flow has changed since and the deployments are there.

    Raises:
        ConfigurationError: Prefect's command failed; with the end of what it said.
        httpx.HTTPError: Prefect is away.
    """
    mark = settings.home / "deployed"
    digest = _digest(settings)
    if mark.exists() and mark.read_text() == digest and not await missing_deployments(settings):
        return
    await _deploy(settings)
    if missing := await missing_deployments(settings):
        raise ConfigurationError(f"deployments are missing after `prefect deploy`: {', '.join(missing)}")
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(digest)


async def missing_deployments(settings: Settings) -> list[str]:
    """Names (`flow/deployment`) that Prefect does not know."""
    from flows.registry import FLOWS  # imports Prefect, which a worker must not do before it has its settings

    names = [f"{flow}/smi" for flow in FLOWS]
    async with prefect_http(settings, BEGINNING_S) as http:
        answers = {name: await http.get(f"/deployments/name/{name}") for name in names}
    missing = []
    for name, answer in answers.items():
        if answer.status_code == httpx.codes.NOT_FOUND:
            missing.append(name)
        else:
            answer.raise_for_status()
    return missing


def _digest(settings: Settings) -> str:
    files = [ROOT / "prefect.yaml", *sorted((ROOT / "flows").glob("*.py"))]
    seen = hashlib.sha256(settings.require("prefect_url").encode())
    for file in files:
        seen.update(file.read_bytes())
    return seen.hexdigest()


async def _deploy(settings: Settings) -> None:
    environment = {
        **os.environ,
        "PREFECT_API_URL": settings.require("prefect_url"),
        "PREFECT_API_AUTH_STRING": settings.require("prefect_auth"),
        "PREFECT_HOME": str(settings.home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = (sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), DEPLOY_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ConfigurationError(f"`prefect deploy --all` failed: {said.decode(errors='replace')[-1000:]}")
