"""Embeddings through SMI's API beside bare sentence-transformers, in one run.

    python tests/benchmarks/embeddings.py [--rounds 5] [--json]

Starts a whole installation (`smi up`) in a home of its own, and in this process the same weights under
`SentenceTransformer.encode(batch_size=32)` with as many threads, and asks them in turn, so that the
machine's drift hits both. 1,000 different short texts in each round. Figures are medians over the rounds:

    bare_texts_per_s         sentence-transformers
    one_texts_per_s          one request of 1,000 texts
    many_texts_per_s         16 clients at once, 32 texts in a request
    embeddings_ratio         the lower of the two, paired with bare in the same round
    one_ratio, many_ratio    each
    cpu_ratio                processor time of bare over that of the model's process, for busy machines
    single_ms, single_added_ms    one text, one request after another; less the bare call
    runner_rss_mib, runner_pss_mib    of the model's process after the rounds (pss: shared pages by share)
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
import typer
from load import Target, median
from overhead import installation
from rich.console import Console
from rich.table import Table

from blocks.catalogue import load_catalogue
from blocks.settings import load_settings
from deployments.node.drivers.options import default_threads
from deployments.node.drivers.weights import resolve
from tasks.fleet import Fleet
from tasks.protocol.inference_pb2 import WatchRequest

MODEL = "all-minilm-l6-v2"
TEXTS, CLIENTS, EACH, BARE_BATCH, SINGLES = 1000, 16, 32, 32, 40
SENTENCE = (
    "the quick brown fox jumps over a lazy dog while seven sailors counted copper coins beside an old "
    "river bridge near the market town where rain fell all night and nobody slept before morning"
)


def texts_of(chance: random.Random) -> list[str]:
    """A thousand texts of 4 to 24 words."""
    return [" ".join(chance.choices(SENTENCE.split(), k=chance.randint(4, 24))) for _ in range(TEXTS)]


def bare(network: Any, texts: list[str]) -> float:
    started = time.perf_counter()
    network.encode(texts, batch_size=BARE_BATCH, normalize_embeddings=True)
    return time.perf_counter() - started


async def asked(target: Target, requests: list[list[str]], clients: int) -> float:
    """Seconds until `clients` have had all `requests` answered."""
    bodies = [target.request(input=texts) for texts in requests]
    connections = [await target.connect() for _ in range(clients)]

    async def client(connection: Any) -> None:
        while bodies:
            await connection.ask(bodies.pop())

    started = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return seconds


async def measure(up: dict[str, Any], home: Path, rounds: int) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(default_threads())
    folder = resolve(load_catalogue(home).get(MODEL))
    network = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    body = {"model": MODEL, "encoding_format": "base64"}  # as OpenAI's client asks
    smi = Target(f"{up['url']}/v1/embeddings", body, up["key"])
    chance = random.Random(7)
    warm = texts_of(chance)
    bare(network, warm)
    await asked(smi, [warm], 1)
    runner = psutil.Process(await runner_pid(home))
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        texts = texts_of(chance)
        some = [texts[start : start + EACH] for start in range(0, TEXTS, EACH)]
        turns = [("bare", None), ("one", [texts]), ("many", some)]
        for name, requests in turns if number % 2 else reversed(turns):
            if requests is None:
                before = time.process_time()
                seconds = bare(network, texts)
                figures["bare_cpu"].append(time.process_time() - before)
            else:
                before = sum(runner.cpu_times()[:2])
                seconds = await asked(smi, requests, CLIENTS if name == "many" else 1)
                figures["cpu"].append(sum(runner.cpu_times()[:2]) - before)
            figures[name].append(TEXTS / seconds)
        singles = texts[:SINGLES]
        figures["bare_single"].append(median([bare(network, [text]) * 1000 for text in singles]))
        times = [await asked(smi, [[text]], 1) * 1000 for text in singles]
        figures["single"].append(median(times))
    told = runner.memory_full_info()
    memory = {"runner_rss_mib": told.rss / 2**20, "runner_pss_mib": told.pss / 2**20}
    return figures_of(figures) | memory


def figures_of(figures: dict[str, list[float]]) -> dict[str, float]:
    of = {name: statistics.median(values) for name, values in figures.items()}
    ratio = {
        name: statistics.median(
            mine / other for mine, other in zip(figures[name], figures["bare"], strict=True)
        )
        for name in ("one", "many")
    }
    return {
        "bare_texts_per_s": of["bare"],
        "one_texts_per_s": of["one"],
        "many_texts_per_s": of["many"],
        "one_ratio": ratio["one"],
        "many_ratio": ratio["many"],
        "embeddings_ratio": min(ratio.values()),
        "cpu_ratio": of["bare_cpu"] / of["cpu"],
        "single_ms": of["single"],
        "single_added_ms": of["single"] - of["bare_single"],
    }


async def runner_pid(home: Path) -> int:
    """The process that has the model."""
    fleet = Fleet(load_settings(home=home))
    await fleet.start()
    await fleet.wait_for_node(20)
    name = next(iter(fleet.nodes))
    stream = fleet.client.stub(name).Watch(WatchRequest(nonce=b"m"), metadata=fleet.client.metadata(name))
    state = await stream.read()
    stream.cancel()
    await fleet.stop()
    return next(runner.pid for runner in state.runners if runner.model == MODEL)


def main(
    rounds: int = typer.Option(5, help="rounds of each figure"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
) -> None:
    with tempfile.TemporaryDirectory(prefix="smi-bench-", dir="/var/tmp") as folder:
        home = Path(folder)
        with installation(home) as up:
            figures = asyncio.run(measure(up, home, rounds))
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
