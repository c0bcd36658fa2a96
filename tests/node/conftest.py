"""Real nodes, as processes with a home, a port and a catalogue of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "plugin"))
from live_node import TOKEN, LiveNode, Starter, stop

PLUGIN = Path(__file__).parent / "plugin"  # a third party's, for nodes; and helpers, for tests
ROOT = Path(__file__).parent.parent.parent
START = """
import logging, sys, uvloop
from blocks.settings import load_settings
from deployments.node.main import serve_node
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
port = int(sys.argv[3]) if sys.argv[3] else None
options = dict(pool="cpu", port=port, memory=int(sys.argv[1]), worker=sys.argv[2] == "worker", preload=False)
uvloop.run(serve_node(load_settings(), **options))
assert not {"torch", "prefect"} & sys.modules.keys()
"""
MODELS = """
[fast]
task = "chat"
driver = "echo"
memory = "10MiB"
slots = 64

[paced]
task = "chat"
driver = "echo"
memory = "10MiB"
slots = 64
options.tokens_per_second = 50

[narrow]
task = "chat"
driver = "echo"
memory = "10MiB"
slots = 1
queue = 3
options.tokens_per_second = 50

[slow-load]
task = "chat"
driver = "echo"
memory = "10MiB"
options.load_s = 1.5

[slow-load-too]
task = "chat"
driver = "echo"
memory = "10MiB"
options.load_s = 1.5

[late]
task = "chat"
driver = "echo"
memory = "10MiB"
load_timeout_s = 0.8
options.load_s = 30

[crashing]
task = "chat"
driver = "echo"
memory = "10MiB"
options.crash_on = "BOOM"

[misspelt]
task = "chat"
driver = "echo"
memory = "10MiB"
options.tokens_per_minute = 3

[incomplete]
task = "chat"
driver = "incomplete"
memory = "10MiB"

[threaded]
task = "chat"
driver = "threaded"
memory = "10MiB"

[lingering]
task = "chat"
driver = "threaded"
memory = "10MiB"
options.linger_s = 0.5

[tally]
task = "tally"
driver = "tally"
memory = "10MiB"
slots = 4

[big-a]
task = "chat"
driver = "echo"
memory = "40MiB"
slots = 4
options.tokens_per_second = 50

[big-b]
task = "chat"
driver = "echo"
memory = "40MiB"
slots = 4
options.load_s = 0.3

[big-c]
task = "chat"
driver = "echo"
memory = "40MiB"
slots = 4

[huge]
task = "chat"
driver = "echo"
memory = "1GiB"
"""


@pytest.fixture(scope="session")
def start_node() -> Iterator[Starter]:
    """Starts nodes; all are ended, and seen to leave nothing, with the session."""
    started: list[LiveNode] = []
    folder = tempfile.TemporaryDirectory(prefix="smi-node-", dir="/var/tmp")

    def start(memory_mib: int = 1000, worker: bool = False, configured: int | None = None) -> LiveNode:
        home = Path(folder.name) / str(len(started))
        home.mkdir()
        (home / "models.toml").write_text(MODELS)
        environment = {
            **os.environ,
            "SMI_HOME": str(home),
            "SMI_JOIN_TOKEN": TOKEN,
            "SMI_PREFECT_URL": "http://127.0.0.1:1/api",
            "SMI_PREFECT_AUTH": "nobody:there",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(PLUGIN))),
            "SMI_NODE_PORT": str(configured or 0),
        }
        port = "0" if configured is None else ""  # as without --port
        log = home / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", START, str(memory_mib * 2**20), "worker" if worker else "alone", port],
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        until = time.monotonic() + 30
        while not (ready := re.search(r"node (\S+) is ready", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        started.append(LiveNode(process, ready[1], home))
        return started[-1]

    yield start
    for node in started:
        stop(node)
    folder.cleanup()


@pytest.fixture(scope="session")
async def node(start_node: Starter) -> AsyncIterator[LiveNode]:
    """One node for all tests that leave it as it was."""
    live = start_node()
    yield live
    await live.client.close()
