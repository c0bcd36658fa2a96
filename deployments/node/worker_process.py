"""The worker's process: Prefect's settings, signals, and its end when the node is gone.

The worker's event loop runs in a thread of its own. Prefect's engine installs a SIGTERM handler around
each flow run that raises wherever the main thread happens to be; outside the main thread it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import stat
import sys
import threading

from blocks.settings import Settings, load_settings
from deployments.pools import RUNS_PER_NODE

log = logging.getLogger("smi.worker")

STOP_S = 4.0  # how long flow runs may take to report that they were stopped


def main() -> None:
    """Run a worker until SIGTERM or SIGINT, or until the node's end of the pipe on stdin closes."""
    parser = argparse.ArgumentParser(prog="python -m deployments.node.worker")
    parser.add_argument("--name", required=True, help="host:port of the node's service")
    parser.add_argument("--pool", required=True, help="work pool, such as cpu")
    parser.add_argument("--limit", type=int, default=RUNS_PER_NODE, help="flow runs at once")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = load_settings()
    prepare_prefect(settings)
    end_with_the_node()
    _run(settings, options.name, options.pool, options.limit)


def prepare_prefect(settings: Settings) -> None:
    """Put Prefect's settings into the environment. Prefect reads it when it is imported."""
    os.environ["PREFECT_API_URL"] = settings.require("prefect_url")
    os.environ["PREFECT_API_AUTH_STRING"] = settings.require("prefect_auth")
    os.environ.setdefault("PREFECT_HOME", str(settings.home / "prefect"))
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", "0.5")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def end_with_the_node() -> None:
    """End this process at once when stdin, if it is a pipe, closes: the node is gone, even by kill -9."""
    kind = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):  # uvloop's pipes are sockets
        return

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="node-watch", daemon=True).start()


def _run(settings: Settings, name: str, pool: str, limit: int) -> None:
    from deployments.node.worker_type import NodeWorker  # after prepare_prefect

    loop, stopping, over = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        try:
            worker = NodeWorker(pool, name=name, limit=limit, settings=settings)
            loop.run_until_complete(worker.serve(stopping))
        except Exception as error:
            log.exception("the worker failed")
            failures.append(error)
        finally:
            over.set()

    def stop(signum: int, frame: object) -> None:
        loop.call_soon_threadsafe(stopping.set)
        threading.Timer(STOP_S, over.set).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=work, name="worker", daemon=True).start()
    over.wait()
    sys.stderr.flush()
    os._exit(1 if failures else 0)  # Prefect's own threads would hold the process for seconds
