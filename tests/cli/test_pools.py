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
    assert [queues[name] for name in ("high", "normal", "low")] == [1, 2, 3]
    (node,) = pools["cpu"]["nodes"]
    assert node["name"].startswith("127.0.0.1:")
    assert node["memory_free"] > 2**20
    shown = smi_command("pools", "--home", str(smi.home))
    assert node["name"] in shown.stdout
    assert "24 GB  high:1 normal:2 low:3" in shown.stdout


def test_a_pool_is_added_once(smi, smi_command):
    name = f"gpu-{time.time_ns()}"
    for _ in range(2):
        added = smi_command("pools", "add", name, "--gpu-memory-gb", "48", "--home", str(smi.home), "--json")
        assert added.returncode == 0, added.stderr
        assert json.loads(added.stdout)["queues"] == {"high": 1, "normal": 2, "low": 3}
    listed = json.loads(smi_command("pools", "--home", str(smi.home), "--json").stdout)
    (pool,) = [pool for pool in listed if pool["name"] == name]
    assert (pool["gpu_memory_gb"], pool["nodes"]) == (48, [])
    assert {"high": 1, "normal": 2, "low": 3}.items() <= pool["queues"].items()


def test_pools_without_prefect_say_so(smi_command, tmp_path):
    env = {"SMI_PREFECT_URL": "http://127.0.0.1:9/api", "SMI_PREFECT_AUTH": "a:b"}
    answer = smi_command("pools", "--home", str(tmp_path), env=env)
    assert answer.returncode == 1
    assert "Prefect at http://127.0.0.1:9/api/ does not answer" in answer.stderr
    assert "is `smi up` running?" in answer.stderr
