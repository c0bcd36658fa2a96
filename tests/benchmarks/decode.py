"""Tokens per second of the chat driver beside transformers' own `generate`, in one run, taking turns.

python tests/benchmarks/decode.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import psutil
import torch

from blocks.catalogue import load_catalogue
from blocks.settings import load_settings
from deployments.node.drivers.transformers import TransformersDriver
from tasks.protocol.shapes import ChatParameters

TOKENS = 64
QUESTION = "Tell me a long story about the sea and all its animals."


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="one object as the last line")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    started = time.perf_counter()
    driver = TransformersDriver(load_catalogue(load_settings().home).get("smollm2-135m"))
    driver.load()
    load_s = time.perf_counter() - started
    ours, bare = [], []
    for _ in range(options.rounds):
        ours.append(driven(driver))
        bare.append(generated(driver))
    figures: dict[str, Any] = {
        "load_s": round(load_s, 2),
        "driver_tokens_per_s": round(statistics.median(ours), 1),
        "generate_tokens_per_s": round(statistics.median(bare), 1),
        "ratio": round(statistics.median(one / other for one, other in zip(ours, bare, strict=True)), 3),
        "rss_mib": psutil.Process().memory_info().rss >> 20,
        "dtype": str(driver.network.dtype),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures) if options.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))


def parameters() -> ChatParameters:
    turns = [{"role": "user", "content": QUESTION}]
    return ChatParameters.model_validate({"messages": turns, "temperature": 0, "max_tokens": TOKENS})


def driven(driver: TransformersDriver) -> float:
    start = time.perf_counter()
    *_, end = driver.run(parameters(), threading.Event())
    return int(getattr(end, "completion_tokens", 0)) / (time.perf_counter() - start)


def generated(driver: TransformersDriver) -> float:
    start = time.perf_counter()
    prompt = torch.tensor([driver._tokens(parameters())])
    output = driver.network.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False
    )
    driver.tokenizer.decode(output[0])
    return (output.shape[1] - prompt.shape[1]) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
