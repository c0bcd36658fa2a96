"""A Prefect whose line can be cut: a TCP proxy in front of the real server."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from blocks.settings import Settings, load_settings
from tasks.live import LiveRun, StepRecord
from tasks.prefect_api import prefect_http


class Line:
    """Passes connections on to Prefect while `up`."""

    def __init__(self, target: httpx.URL) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.refused = 0

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers |= {writer, here}
        await asyncio.gather(self._pump(reader, here), self._pump(there, writer))
        self._writers -= {writer, here}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            writer.close()


class Prefect:
    """What Prefect says of the runs of one test; each test has a flow of its own."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.flow = f"recorder-{uuid.uuid4().hex[:8]}"

    async def post(self, path: str, body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    async def runs(self) -> list[dict[str, Any]]:
        """Flow runs in the order in which they were created."""
        found: list[dict[str, Any]] = []
        while True:
            page = await self.post(
                "/flow_runs/filter",
                {"flows": {"name": {"any_": [self.flow]}}, "limit": 200, "offset": len(found)},
            )
            found += page
            if len(page) < 200:
                return sorted(found, key=lambda run: str(run["created"]))

    async def steps(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        return list(await self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}}))

    async def states(self, run: dict[str, Any]) -> list[str]:
        answer = await self.http.get("/flow_run_states/", params={"flow_run_id": run["id"]})
        return [state["type"] for state in answer.json()]

    def run(self, request_id: str = "") -> LiveRun:
        return LiveRun(self.flow, request_id or f"req_{uuid.uuid4().hex[:12]}")


def end(run: LiveRun, **changes: Any) -> LiveRun:
    """`run` as it is after a chat."""
    run.ended = time.time()
    run.labels |= {"model": "echo", "tier": "local", "completion_tokens": 3}
    run.steps = [
        StepRecord("generate", run.started, run.ended),
        StepRecord("dispatch", run.started, run.started + 0.001),
    ]
    for name, value in changes.items():
        setattr(run, name, value)
    return run


async def until(true: Callable[[], Awaitable[bool]], timeout_s: float = 30) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(timeout_s):
        while not await true():
            await asyncio.sleep(0.1)


@pytest.fixture
def ending() -> Callable[..., LiveRun]:
    return end


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
async def prefect(prefect_settings: Settings) -> AsyncIterator[Prefect]:
    async with prefect_http(prefect_settings, timeout_s=30) as http:
        # The flow is left there: steps whose flow run is gone hold up Prefect's task run recorder.
        yield Prefect(http)


@pytest.fixture
def prefect_settings(tmp_path: Path, smi: Any) -> Settings:
    """A home of its own, and the session's Prefect."""
    return load_settings(home=tmp_path, prefect_url=smi.prefect_url, prefect_auth=smi.prefect_auth)


@pytest.fixture
async def line(prefect_settings: Settings) -> AsyncIterator[Line]:
    line = Line(httpx.URL(prefect_settings.require("prefect_url")))
    await line.up()
    yield line
    await line.down()


@pytest.fixture
def settings(prefect_settings: Settings, line: Line) -> Settings:
    """Prefect behind the line."""
    return prefect_settings.model_copy(update={"prefect_url": f"http://127.0.0.1:{line.port}/api"})
