"""A node process under test, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

from tasks.protocol.client import Client, OnEvent
from tasks.protocol.inference_pb2 import Done, Event, Header, NodeState, RunnerState, WatchRequest
from tasks.protocol.shapes import ChatResult

TOKEN = "join-token-of-the-tests"


class LiveNode:
    """A node process and a client of it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, home: Path) -> None:
        self.process, self.name, self.home = process, name, home
        self.client = Client(TOKEN)

    def header(self, model: str, text: str = "one two three", **fields: Any) -> Header:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        fields.setdefault("task", "chat")
        fields.setdefault("parameters", json.dumps(asked).encode())
        return Header(model=model, **fields)

    async def ask(self, model: str, text: str = "one two three", target: str = "", **fields: Any) -> str:
        done = await self.run(self.header(model, text, **fields), target=target)
        return ChatResult.model_validate_json(done.result).text

    async def run(
        self,
        header: Header,
        media: AsyncIterator[bytes] | None = None,
        on_event: OnEvent | None = None,
        target: str = "",
    ) -> Done:
        return await self.client.run(target or self.name, self.name, header, media, on_event)

    async def states(self) -> AsyncIterator[NodeState]:
        stub = self.client.stub(self.name)
        stream = stub.Watch(WatchRequest(nonce=b"n"), metadata=self.client.metadata(self.name))
        try:
            async for state in stream:
                yield state
        finally:
            stream.cancel()

    async def state(
        self, until: Callable[[NodeState], bool] = lambda state: True, within_s: float = 5
    ) -> NodeState:
        """The first state for which `until` holds."""
        async with asyncio.timeout(within_s), contextlib.aclosing(self.states()) as states:
            async for state in states:
                if until(state):
                    return state
        raise AssertionError("the node closed its Watch stream")

    async def runner(
        self, model: str, until: Callable[[RunnerState], bool] = lambda runner: True, within_s: float = 5
    ) -> RunnerState:
        """The first state of `model`'s runner for which `until` holds."""
        state = await self.state(lambda state: any(map(until, of(state, model))), within_s)
        return of(state, model)[0]


def of(state: NodeState, model: str) -> list[RunnerState]:
    return [runner for runner in state.runners if runner.model == model]


class Events:
    """Collects a stream; `begun` is set at its first text."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.begun = asyncio.Event()

    async def __call__(self, event: Event) -> None:
        self.all.append(event)
        if event.HasField("text"):
            self.begun.set()

    @property
    def text(self) -> str:
        return "".join(event.text.text for event in self.all)


Starter = Callable[..., LiveNode]


def alive_after(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Which of `processes` still run after at most `seconds`; one that only waits to be reaped does not."""
    until = time.monotonic() + seconds
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(node: LiveNode) -> None:
    """SIGTERM; the node and all below it end, with status 0."""
    if node.process.poll() is not None:
        return
    below = psutil.Process(node.process.pid).children(recursive=True)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(20) == 0, (node.home / "log").read_text()
    assert not alive_after(below, 5)
    assert "never retrieved" not in (node.home / "log").read_text()
