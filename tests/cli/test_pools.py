"""`smi pools`."""

from __future__ import annotations

import json
import time


def test_pools_are_listed_with_their_queues_and_nodes(smi, smi_command):
    answer = smi_command("pools", "--home", str(smi.home), "--json")
    assert answer.returncode == 0, answer.stderr
    pools = {pool["name"]: pool for pool in json.loads(answer.stdout)}
    assert {"cpu", "gpu-8gb", "gpu-24gb", "gpu-80gb", "hpc"} <= pools.keys()
    assert pools["gpu-24gb"]["gpu_memory_gb"] == 24
    queues = pools["cpu"]["queues"]
    assert queues == {"high": 1, "normal": 2, "low": 3}  # and not Prefect's own
    (node,) = pools["cpu"]["nodes"]
    assert node["name"].startswith("127.0.0.1:")
    assert node["memory_free"] > 2**20
    shown = smi_command("pools", "--home", str(smi.home))
    assert node["name"] in shown.stdout
    headings, *lines = shown.stdout.splitlines()
    at = [headings.index(name) for name in ("pool", "GPU memory", "queues:priority", "nodes (free memory)")]
    (line,) = [line for line in lines if line.startswith("gpu-24gb ")]
    ends = [*at[1:], None]
    cells = [line[begin:end].strip() for begin, end in zip(at, ends, strict=True)]
    assert cells == ["gpu-24gb", "24 GB", "high:1 normal:2 low:3", "no node"]


def test_a_pool_is_added_once(smi, smi_command):
    name = f"gpu-{time.time_ns()}"
    for is_new in (True, False):
        added = smi_command("pools", "add", name, "--gpu-memory-gb", "48", "--home", str(smi.home), "--json")
        assert added.returncode == 0, added.stderr
        told = json.loads(added.stdout)
        assert (told["queues"], told["new"]) == ({"high": 1, "normal": 2, "low": 3}, is_new)
    again = smi_command("pools", "add", name, "--gpu-memory-gb", "48", "--home", str(smi.home))
    assert f"pool {name} exists already" in again.stderr
    listed = json.loads(smi_command("pools", "--home", str(smi.home), "--json").stdout)
    (pool,) = [pool for pool in listed if pool["name"] == name]
    assert (pool["gpu_memory_gb"], pool["nodes"]) == (48, [])
    assert pool["queues"] == {"high": 1, "normal": 2, "low": 3}


async def test_prefect_says_what_a_pool_is(prefect):
    pool = (await prefect.get("/work_pools/hpc")).json()
    assert pool["description"] == "nodes inside an institution's HPC cluster"


def test_pools_without_prefect_say_so(smi_command, tmp_path):
    env = {"SMI_PREFECT_URL": "http://127.0.0.1:9/api", "SMI_PREFECT_AUTH": "a:b"}
    answer = smi_command("pools", "--home", str(tmp_path), env=env)
    assert answer.returncode == 1
    assert "Prefect at http://127.0.0.1:9/api/ does not answer" in answer.stderr
    assert "is `smi up` running?" in answer.stderr
