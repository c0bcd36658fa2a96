"""The node of a whole installation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from blocks.settings import load_settings
from tasks.fleet import Fleet
from tasks.protocol.inference_pb2 import RunnerState, WatchRequest


class Node:
    """Looks at the node's own state."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name

    async def runner(self, model: str) -> RunnerState | None:
        stream = self.fleet.client.stub(self.name).Watch(
            WatchRequest(nonce=b"test"), metadata=self.fleet.client.metadata(self.name)
        )
        state = await stream.read()
        stream.cancel()
        return next((runner for runner in state.runners if runner.model == model), None)

    async def counter(self, model: str, name: str) -> float:
        runner = await self.runner(model)
        return runner.counters[name] if runner is not None else 0.0

    async def reaches(self, model: str, timeout_s: float = 20, **least: float) -> None:
        """Wait until fields or counters of `model`'s runner are at least so much."""
        async with asyncio.timeout(timeout_s):
            while True:
                runner = await self.runner(model)
                if runner is not None and all(
                    getattr(runner, name, runner.counters[name]) >= value for name, value in least.items()
                ):
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
async def node(smi: Any) -> AsyncIterator[Node]:
    fleet = Fleet(load_settings(home=smi.home))
    await fleet.start()
    assert await fleet.wait_for_node(20)
    yield Node(fleet, next(iter(fleet.nodes)))
    await fleet.stop()
