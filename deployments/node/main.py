"""A node: the gRPC service over its runners, and the Prefect worker of its pool as a second process.

Two processes, because flow runs stall an event loop by up to 150 ms and token streams would stutter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import grpc.aio

from blocks.catalogue import load_catalogue
from blocks.errors import ConfigurationError
from blocks.settings import Settings
from deployments.listen import SERVER_OPTIONS, bind
from deployments.node.ledger import Ledger, default_memory, gib
from deployments.node.runners import Runners
from deployments.node.service import Node
from deployments.node.wire import Beats, Guarded
from deployments.pools import check_pool
from deployments.up.processes import is_free
from tasks.protocol.auth import Gate

# A node stops within 7 s, since `smi up` kills it after 8: it drains, then closes its runners, and its
# worker stops meanwhile.
DRAIN_S = 3.0  # what is being worked on may end within this after SIGTERM
CLOSE_S = 2.0  # runners that have not ended within this are killed
WORKER_STOP_S = 5.0  # and so is the worker
BACK_OFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0  # a worker that lived so long starts the back-off anew
CPU_POOL = "cpu"

log = logging.getLogger("smi.node")


async def serve_node(
    settings: Settings,
    *,
    pool: str,
    port: int | None = None,
    memory: int | None = None,
    worker: bool = True,
    advertise: str | None = None,
    preload: bool = True,
) -> None:
    """Run a node until SIGTERM, SIGINT or SIGHUP; then drain briefly and stop everything.

    Args:
        port: 0 is any free one; default `settings.node_port`, or any free one if that is taken.
        memory: bytes its models may use together; default 80 % of RAM for pool `cpu`.
        worker: also run the Prefect worker of `pool`.
        advertise: `host:port` at which others reach this node through a tunnel, since it listens on
            loopback only; it is the node's name, proofs are bound to it. Default: where it listens.
        preload: import what drivers name (torch, ...) once, in the background, for all runners.

    Raises:
        ConfigurationError: the pool does not exist, the port is taken, the host not loopback, the join token
            or `memory` missing.
    """
    token = settings.require("join_token")
    await check_pool(settings, pool)
    ledger = Ledger(_memory(pool, memory))
    catalogue = load_catalogue(settings.home)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    target = f"{settings.host}:{_free_port(settings) if port is None else port}"
    bound = bind(server, target, "SMI_HOST", "SMI_NODE_PORT or --port (0: any free one)")
    name = advertise or f"{settings.host}:{bound}"
    beats = Beats()
    folder = settings.home / "run"
    runners = Runners(
        name=name, token=token, folder=folder, ledger=ledger, changed=beats.changed, preload=preload
    )
    node = Node(name=name, pool=pool, token=token, catalogue=catalogue, runners=runners, beats=beats)
    server.add_generic_rpc_handlers((Guarded(Gate(token, name), node.methods()),))
    stopping = _stop_signals()
    runners.start()
    await server.start()
    log.info("node %s is ready: pool %s, %s for models", name, pool, gib(ledger.total))
    supervised = asyncio.create_task(_keep_worker(settings, name, pool)) if worker else None
    await stopping.wait()
    log.info("node %s stops", name)
    await _stop(node, server, runners, supervised, stopping)


async def _stop(
    node: Node,
    server: grpc.aio.Server,
    runners: Runners,
    supervised: asyncio.Task[None] | None,
    stopping: asyncio.Event,
) -> None:
    stopping.clear()
    if supervised is not None:
        supervised.cancel()
    hurried = asyncio.create_task(stopping.wait())
    drained = asyncio.create_task(node.drained(DRAIN_S))
    await asyncio.wait({hurried, drained}, return_when=asyncio.FIRST_COMPLETED)
    for task in (hurried, drained):
        task.cancel()
    await runners.close(CLOSE_S)
    if supervised is not None:
        await asyncio.wait({supervised})
    await server.stop(0.1)


def _free_port(settings: Settings) -> int:
    """The port of the settings; 0 if it is taken, perhaps by another node of this machine."""
    if is_free(settings.host, settings.node_port):
        return settings.node_port
    log.info("port %d is taken; this node takes any free one", settings.node_port)
    return 0


def _memory(pool: str, memory: int | None) -> int:
    if memory is not None:
        return memory
    if pool == CPU_POOL:
        return default_memory()
    raise ConfigurationError(f"say how much memory models may use in pool {pool!r}: `--memory 22GiB`")


def _stop_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def _keep_worker(settings: Settings, name: str, pool: str) -> None:
    """Run the Prefect worker, anew after a pause whenever it ends, until cancelled."""
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        started = loop.time()
        try:
            end = f"ended with code {await _run_worker(settings, name, pool)}"
        except OSError as error:  # no process or memory to be had; perhaps later
            end = f"did not start ({type(error).__name__})"
        failures = 0 if loop.time() - started > STEADY_S else failures + 1
        pause = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1] if failures else BACK_OFF_S[0]
        log.warning("the worker of %s %s; starting it again in %.0f s", name, end, pause)
        await asyncio.sleep(pause)


async def _run_worker(settings: Settings, name: str, pool: str) -> int:
    """Its exit code, once it has ended; it ends as well when this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deployments.node.worker", "--name", name, "--pool", pool),
        stdin=asyncio.subprocess.PIPE,  # it ends when this closes, and so also when we are killed
        env=_worker_environment(settings),
        start_new_session=True,  # Ctrl-C is for us; we end it in order
    )
    try:
        return await process.wait()
    finally:
        await asyncio.shield(_end_worker(process))


async def _end_worker(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, so that flow runs can say that they were stopped; then SIGKILL."""
    try:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), WORKER_STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    except ProcessLookupError:
        pass  # it ended meanwhile
    if process.stdin is not None:
        process.stdin.close()


def _worker_environment(settings: Settings) -> dict[str, str]:
    """Ours, with these settings, so that the worker reads the same whatever set them here."""
    chosen = {
        "SMI_HOME": str(settings.home),
        "SMI_HOST": settings.host,
        "SMI_PREFECT_PORT": str(settings.prefect_port),
        "SMI_PREFECT_URL": settings.prefect_url,
        "SMI_STORAGE_URL": settings.storage_url,
    }
    for key in ("prefect_auth", "database_url", "join_token"):
        secret = getattr(settings, key)
        chosen[f"SMI_{key.upper()}"] = secret.get_secret_value() if secret is not None else None
    return {**os.environ, **{key: value for key, value in chosen.items() if value is not None}}
