"""A node whose storage is another: jobs that come to it fail at once, and say what to set."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from blocks.settings import Settings
from deployments.pools import add_pool
from tasks.fleet import Fleet

POOL = "elsewhere"


@pytest.fixture
async def elsewhere(smi: Any, settings: Settings, folder: Path) -> AsyncIterator[Path]:
    """The storage of a node that alone has room for the model `echo-elsewhere`."""
    await add_pool(settings, POOL, 102400)
    home, storage = folder / "elsewhere", folder / "elsewhere-storage"
    home.mkdir()
    (home / "models.toml").write_text((smi.home / "models.toml").read_text())
    chosen = {
        "SMI_HOME": str(home),
        "SMI_STORAGE_URL": f"file://{storage}",
        "SMI_PREFECT_URL": smi.prefect_url,
    }
    secrets = {"SMI_PREFECT_AUTH": smi.prefect_auth, "SMI_JOIN_TOKEN": settings.require("join_token")}
    with (home / "log").open("wb") as log:
        node = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "deployments", "node"),
            *("--pool", POOL, "--port", "0", "--memory", "200TiB"),
            env={**os.environ, **chosen, **secrets},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    fleet = Fleet(settings)
    await fleet.start()
    try:
        async with asyncio.timeout(60):
            while not any(known.pool == POOL for known in fleet.nodes.values()):
                assert node.returncode is None, (home / "log").read_text()
                await asyncio.sleep(0.1)
        yield storage
    finally:
        await fleet.stop()
        node.terminate()
        await node.wait()


async def test_a_node_with_another_storage_says_what_to_set(client: Any, elsewhere: Path) -> None:
    job = await client.over(await client.chat("hello", model="echo-elsewhere"), timeout_s=90)
    assert (job["status"], job["attempt"], job["error"]["code"]) == ("failed", 1, "storage_not_shared")
    message = job["error"]["message"]
    assert f"storage file://{elsewhere} of machine " in message
    assert f"does not have jobs/{job['id']}/request.json: machines need shared storage" in message
    assert "SMI_STORAGE_URL" in message
    answer = await client.http.get(f"/v1/jobs/{job['id']}/result")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "storage_not_shared")
    assert job["steps"] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("pools", "add", POOL, "--gpu-memory-gb", "8"), "exists already, with 102400 GB"),
        (("pools", "add", "Big GPU", "--gpu-memory-gb", "8"), "'Big GPU' is no name for a pool"),
        (("pools", "add", "prefect-a", "--gpu-memory-gb", "8"), "is no name for a pool"),
        (("node", "--pool", "nowhere", "--memory", "1GiB", "--port", "0"), "smi pools add nowhere"),
    ],
)
async def test_what_is_wrong_with_a_pool_is_told(
    smi: Any, settings: Settings, smi_command: Callable[..., Any], arguments: tuple[str, ...], told: str
) -> None:
    await add_pool(settings, POOL, 102400)
    said = smi_command(*arguments, "--home", str(smi.home))
    assert said.returncode == 1
    assert told in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1
