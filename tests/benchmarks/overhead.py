"""What SMI's API costs: beside a bare skeleton and the direct gRPC call, in one run.

    python tests/benchmarks/overhead.py [--rounds 5] [--json]

Starts a whole installation (`smi up`) in a home of its own and the skeleton (`skeleton.py`), and asks
them in turn, so that the machine's drift hits both. Figures are medians over the rounds; times in ms:

    unary_ms_p50, skeleton_ms_p50, direct_grpc_ms_p50   one request after another
    unary_added_ms_p50       SMI less the skeleton
    unary_rps_c16, skeleton_rps_c16, rps_ratio          16 clients at once
    ttft_added_ms_p50_c16    first byte of 16 streams at once, SMI less the skeleton
    cpu_ms_per_request       of the API's process, in the run with 16 clients
    recorded_share           runs found in Prefect, of all requests answered
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import typer
from load import Target, median, one_by_one, together
from rich.console import Console
from rich.table import Table

from blocks.settings import Settings, load_settings
from tasks.fleet import Fleet
from tasks.prefect_api import prefect_http
from tasks.protocol.inference_pb2 import Header
from tasks.protocol.shapes import ChatParameters, Message

TEXT = "one two three four five six seven eight"
CLIENTS, BURST_S = 16, 0.8
PACE = 50  # tokens per second of a stream
PORTS = ["--port", "0", "--node-port", "0", "--prefect-port", "0"]
MODELS = f"""
[echo-paced]
task = "chat"
driver = "echo"
memory = "64MiB"
slots = 256
licence = "Apache-2.0"
options = {{ tokens_per_second = {PACE} }}
"""


@contextmanager
def installation(home: Path) -> Iterator[dict[str, Any]]:
    """`smi up` in `home`, on free ports; what it prints as JSON."""
    (home / "models.toml").write_text(MODELS)
    smi = Path(sys.executable).with_name("smi")
    process = subprocess.Popen(
        [str(smi), "up", "--home", str(home), "--json", *PORTS],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)


@asynccontextmanager
async def skeleton(home: Path) -> AsyncIterator[str]:
    """The skeleton's two processes; the URL of its API."""
    script, socket, port = Path(__file__).with_name("skeleton.py"), home / "skeleton.sock", free_port()
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, str(script), *arguments)
        for arguments in (["backend", str(socket)], ["api", str(socket), str(port)])
    ]
    try:
        await listening(port)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        for process in processes:
            process.terminate()
            await process.wait()


async def listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)
            else:
                return


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Direct:
    """The gRPC call that the API makes, made by itself."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        messages = [Message(role="user", content=TEXT)]
        parameters = ChatParameters(messages=messages).model_dump_json(exclude_none=True).encode()
        self._header = Header(request_id="direct", model="echo", task="chat", parameters=parameters)

    async def one_by_one(self, count: int) -> list[float]:
        ((name, node),) = self._fleet.nodes.items()
        target = f"unix:{node.runners['echo'].socket}"
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await self._fleet.client.run(target, name, self._header)
            times.append((time.perf_counter() - started) * 1000)
        return times


async def warm(target: Target) -> int:
    """How many requests it took."""
    async with asyncio.timeout(120):
        await one_by_one(target, 100)
        count, _, _ = await together(target, CLIENTS, 0.5, stream=True)
        return 100 + count


async def recorded(settings: Settings, expected: int) -> int:
    """Runs in Prefect once no more are awaited or come."""
    count, grown = -1, time.monotonic()
    async with prefect_http(settings, timeout_s=60) as http:
        while count < expected and time.monotonic() - grown < 60:
            found = await http.post("/flow_runs/count", json={"flow_runs": {"tags": {"all_": ["live"]}}})
            found.raise_for_status()
            if found.json() > count:
                count, grown = found.json(), time.monotonic()
            await asyncio.sleep(1)
    return count


async def measure(up: dict[str, Any], home: Path, rounds: int) -> dict[str, float]:
    body = {"model": "echo", "messages": [{"role": "user", "content": TEXT}]}
    settings = load_settings(home=home)
    figures: dict[str, list[float]] = defaultdict(list)
    fleet = Fleet(settings)
    await fleet.start()
    async with skeleton(home) as bare_url:
        smi = Target(f"{up['url']}/v1/chat/completions", body, up["key"])
        paced = Target(smi.url, body | {"model": "echo-paced"}, up["key"])
        bare = Target(bare_url, body | {"tokens_per_second": PACE})
        await warm(bare)
        answered = await warm(smi) + await warm(paced)
        api, direct = psutil.Process(api_pid(smi.url)), Direct(fleet)
        for _ in range(rounds):
            figures["direct"].append(median(await direct.one_by_one(200)))
            figures["bare"].append(median(await one_by_one(bare, 200)))
            figures["smi"].append(median(await one_by_one(smi, 200)))
            count, seconds, _ = await together(bare, CLIENTS, BURST_S)
            figures["bare_rps"].append(count / seconds)
            before = sum(api.cpu_times()[:2])
            count, seconds, _ = await together(smi, CLIENTS, BURST_S)
            figures["cpu"].append((sum(api.cpu_times()[:2]) - before) * 1000 / count)
            figures["smi_rps"].append(count / seconds)
            answered += count + 200
            _, _, firsts = await together(bare, CLIENTS, BURST_S, stream=True)
            figures["bare_ttft"].append(median(firsts))
            count, _, firsts = await together(paced, CLIENTS, BURST_S, stream=True)
            figures["smi_ttft"].append(median(firsts))
            answered += count
    await fleet.stop()
    return figures_of(figures) | {"requests": answered}


def figures_of(figures: dict[str, list[float]]) -> dict[str, float]:
    of = {name: statistics.median(values) for name, values in figures.items()}
    ratios = [mine / bare for mine, bare in zip(figures["smi_rps"], figures["bare_rps"], strict=True)]
    return {
        "unary_ms_p50": of["smi"],
        "skeleton_ms_p50": of["bare"],
        "direct_grpc_ms_p50": of["direct"],
        "unary_added_ms_p50": of["smi"] - of["bare"],
        "unary_rps_c16": of["smi_rps"],
        "skeleton_rps_c16": of["bare_rps"],
        "rps_ratio": statistics.median(ratios),
        "ttft_ms_p50_c16": of["smi_ttft"],
        "ttft_added_ms_p50_c16": of["smi_ttft"] - of["bare_ttft"],
        "cpu_ms_per_request": of["cpu"],
    }


def api_pid(url: str) -> int:
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise RuntimeError(f"nobody listens on port {port}")


def main(
    rounds: int = typer.Option(5, help="rounds of each figure"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    drain: bool = typer.Option(True, help="wait for Prefect's records and count them"),
) -> None:
    with tempfile.TemporaryDirectory(prefix="smi-bench-", dir="/var/tmp") as folder:
        home = Path(folder)
        with installation(home) as up:
            figures = asyncio.run(measure(up, home, rounds))
            if drain:
                found = asyncio.run(recorded(load_settings(home=home), int(figures["requests"])))
                figures["recorded_share"] = found / figures["requests"]
    figures = {name: round(value, 3) for name, value in figures.items()}
    if as_json:
        print(json.dumps(figures))
        return
    table = Table("figure", "median")
    for name, value in figures.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
