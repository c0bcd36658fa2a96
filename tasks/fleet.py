"""Which nodes there are, alive and proven, with what each has loaded and free.

Prefect's list of workers is the registry (a node's worker is named `host:port`); liveness and load come
from each node's own `Watch` stream. The last known addresses are kept on disk, so that requests go on
while Prefect is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx

from blocks.catalogue import Catalogue, load_catalogue
from blocks.settings import Settings, load_settings
from blocks.storage import Storage
from tasks.prefect_api import prefect_http
from tasks.protocol.auth import node_proof
from tasks.protocol.client import Client
from tasks.protocol.inference_pb2 import READY, NodeState, WatchRequest
from tasks.protocol.machine import machine_id

DISCOVER_S = 1.0  # while no node is known
REDISCOVER_S = 5.0
SILENCE_S = 5.0  # a node that says nothing for so long is gone
RETRY_S, LONGEST_RETRY_S = 0.5, 5.0
POOL_TYPE = "smi"

log = logging.getLogger("smi.fleet")


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded (or loading) model on a node."""

    model: str
    ready: bool = True
    slots: int = 1
    active: int = 0
    queued: int = 0
    memory: int = 0
    socket: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it last described itself. Memory in bytes; `local`: on this machine, sockets in reach."""

    name: str
    pool: str
    memory_total: int
    memory_free: int
    runners: dict[str, Runner] = field(default_factory=dict)
    draining: bool = False
    local: bool = False


class Fleet:
    """Watches the nodes of one installation. `nodes` is what is known now."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.catalogue: Catalogue = load_catalogue(settings.home)
        self.storage = Storage(settings.storage)
        self.nodes: dict[str, Node] = {}
        self._token = settings.require("join_token")
        self.client = Client(self._token)
        self._machine = machine_id()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._discovery: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        for name in self._remembered():
            self._watch(name)
        self._discovery = asyncio.create_task(self._discover())

    async def stop(self) -> None:
        tasks = [task for task in (self._discovery, *self._watches.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    async def wait_for_node(self, timeout_s: float) -> bool:
        """Whether a node is known, after waiting for one at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.nodes:
                    self._changed.clear()
                    await self._changed.wait()
        return bool(self.nodes)

    async def _discover(self) -> None:
        async with prefect_http(self.settings) as http:
            while True:
                try:
                    names = await listed_nodes(http)
                    self._look_after(names | self.nodes.keys())
                except httpx.HTTPError as error:
                    log.debug("Prefect does not list its workers: %r", error)
                except (OSError, ValueError, LookupError) as error:
                    log.warning("nodes cannot be looked up or remembered: %s", type(error).__name__)
                await asyncio.sleep(REDISCOVER_S if self.nodes else DISCOVER_S)

    def _look_after(self, names: set[str]) -> None:
        for name in names - self._watches.keys():
            self._watch(name)
        for name in self._watches.keys() - names:
            self._watches.pop(name).cancel()
            self.client.forget(name)
        self._remember(names)

    def _watch(self, name: str) -> None:
        self._watches[name] = asyncio.create_task(self._keep_watching(name))

    async def _keep_watching(self, name: str) -> None:
        pause = RETRY_S
        while True:
            try:
                await self._follow(name)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                log.debug(
                    "node %s: %s", name, error.code() if isinstance(error, grpc.aio.AioRpcError) else "silent"
                )
            finally:
                pause = RETRY_S if name in self.nodes else min(2 * pause, LONGEST_RETRY_S)
                self._gone(name)
            await asyncio.sleep(pause)

    def _gone(self, name: str) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            log.info("node %s is gone", name)
            self._leave(node.runners.values())

    def _leave(self, runners: Iterable[Runner]) -> None:
        """A runner that is gone does not come back at its socket."""
        for runner in runners:
            self.client.forget(f"unix:{runner.socket}")

    async def _follow(self, name: str) -> None:
        nonce = os.urandom(16)
        stream = self.client.stub(name).Watch(WatchRequest(nonce=nonce), metadata=self.client.metadata(name))
        try:
            first = await asyncio.wait_for(stream.read(), SILENCE_S)
            if first is grpc.aio.EOF or not hmac.compare_digest(
                first.proof, node_proof(self._token, name, nonce)
            ):
                log.warning("node %s did not prove that it knows the join token; it gets nothing", name)
                await asyncio.sleep(DISCOVER_S)
                return
            state = first
            while state is not grpc.aio.EOF:
                before, now = self.nodes.get(name), view(name, state, self._machine)
                self.nodes[name] = now
                if before is not None:
                    here = {runner.socket for runner in now.runners.values()}
                    self._leave(runner for runner in before.runners.values() if runner.socket not in here)
                self._changed.set()
                state = await asyncio.wait_for(stream.read(), SILENCE_S)
        finally:
            stream.cancel()

    @property
    def _memory(self) -> Path:
        return self.settings.home / "fleet.json"

    def _remembered(self) -> list[str]:
        try:
            return [str(name) for name in json.loads(self._memory.read_text())]
        except (FileNotFoundError, ValueError):
            return []

    def _remember(self, names: set[str]) -> None:
        if names and sorted(names) != self._remembered():
            part = self._memory.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(sorted(names)))
            part.replace(self._memory)


async def listed_nodes(http: httpx.AsyncClient) -> set[str]:
    """Names (host:port) of the workers that Prefect has heard of lately, in pools of our type."""
    response = await http.post("/work_pools/filter", json={"work_pools": {"type": {"any_": [POOL_TYPE]}}})
    response.raise_for_status()
    names = set()
    for pool in response.json():
        workers = await http.post(f"/work_pools/{pool['name']}/workers/filter", json={})
        workers.raise_for_status()
        names |= {
            worker["name"]
            for worker in workers.json()
            if ":" in worker["name"] and worker["status"] != "OFFLINE"
        }
    return names


def view(name: str, state: NodeState, machine: str) -> Node:
    """The wire's state as the dispatcher reads it."""
    return Node(
        name=name,
        pool=state.pool,
        memory_total=state.memory_total,
        memory_free=max(0, state.memory_total - state.memory_reserved),
        runners={
            runner.model: Runner(
                model=runner.model,
                ready=runner.stage == READY,
                slots=runner.slots,
                active=runner.active,
                queued=runner.queued,
                memory=runner.memory,
                socket=runner.socket,
            )
            for runner in state.runners
        },
        draining=state.draining,
        local=state.machine == machine,
    )


class _Current(threading.local):
    """The fleet of this thread's event loop."""

    fleet: Fleet | None = None


_current = _Current()


async def current_fleet(settings: Settings | None = None) -> Fleet:
    """The fleet of this thread's event loop, started on first use with `settings`, or this process's."""
    fleet = _current.fleet
    if fleet is None or fleet.loop.is_closed():
        fleet = _current.fleet = Fleet(settings or load_settings())
        await fleet.start()
    return fleet


async def close_fleet() -> None:
    """Stop this event loop's fleet, if it has one."""
    fleet, _current.fleet = _current.fleet, None
    if fleet is not None and not fleet.loop.is_closed():
        await fleet.stop()
