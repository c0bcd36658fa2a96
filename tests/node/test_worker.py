"""Which flows a worker runs, and how a run that it hosts ends. With a whole installation: tests/jobs."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.schemas.objects import StateType

from blocks.errors import PermissionDenied, SmiError
from blocks.storage import Storage
from deployments.node.worker_flows import PACKAGE, Execution, flow_at, hosted
from flows.chat import chat


@pytest.mark.parametrize(
    "entrypoint", ["flows/chat.py:chat", "flows.chat:chat", str(PACKAGE / "chat.py") + ":chat"]
)
def test_a_flow_of_ours_is_found(entrypoint: str) -> None:
    assert flow_at(entrypoint) is chat


@pytest.mark.parametrize(
    "entrypoint",
    [
        None,
        "",
        "flows",
        "flows.chat",
        "flows.chat:ChatRequest",
        "flows.chat:missing",
        "flows.missing:chat",
        "flows.chat:chat.fn",
        "flows:chat",
        "flows.chat:flow",
        "flowsx.chat:chat",
        "os:system",
        "deployments.cli:main",
        "flows/../deployments/cli.py:main",
        "/tmp/flows/chat.py:chat",
        "/etc/passwd:chat",
    ],
)
def test_a_module_named_by_the_request_is_not_imported(entrypoint: str | None) -> None:
    with pytest.raises(PermissionDenied, match="refused"):
        flow_at(entrypoint)


@flow
async def hang() -> None:
    await asyncio.sleep(60)


@flow
async def tell(text: str) -> None:
    raise ValueError(f"content: {text}")


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"file://{tmp_path}")


@pytest.mark.parametrize(
    ("why", "state"), [("cancelled", StateType.CANCELLED), ("shutdown", StateType.CRASHED)]
)
async def test_a_cancel_is_told_from_a_shutdown(
    storage: Storage, tmp_path: Path, why: str, state: StateType
) -> None:
    execution = Execution()
    body = asyncio.create_task(hosted(hang, execution, storage, tmp_path).fn())
    while execution.work is None:
        await asyncio.sleep(0)
    execution.stop(why)  # type: ignore[arg-type]
    assert (await body).type == state


async def test_a_run_stopped_before_it_began_does_nothing(storage: Storage, tmp_path: Path) -> None:
    execution = Execution()
    execution.stop("cancelled")
    state = await asyncio.wait_for(hosted(hang, execution, storage, tmp_path).fn(), 5)
    assert state.type == StateType.CANCELLED


async def test_an_error_that_holds_content_is_told_by_its_type(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(SmiError, match="unexpected ValueError") as caught:
        await hosted(tell, Execution(), storage, tmp_path).fn("secret")
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.fixture
async def lonely(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker whose Prefect is away."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deployments.node.worker", "--name", "127.0.0.1:1", "--pool", "cpu"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "SMI_HOME": str(tmp_path),
            "SMI_PREFECT_URL": "http://127.0.0.1:9/api",
            "SMI_PREFECT_AUTH": "a:b",
            "SMI_JOIN_TOKEN": "t",
        },
    )
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def said(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if words in line.decode():
                return
    raise AssertionError(f"it ended with {process.returncode}")


async def test_a_worker_waits_for_prefect_and_ends_with_its_node(
    lonely: asyncio.subprocess.Process,
) -> None:
    await said(lonely, "Prefect does not answer")
    await said(lonely, "Prefect does not answer")
    assert lonely.stdin is not None
    gone = time.monotonic()
    lonely.stdin.close()
    assert await asyncio.wait_for(lonely.wait(), 10) == 0
    assert time.monotonic() - gone < 2


async def test_a_worker_that_waits_for_prefect_stops_when_told(lonely: asyncio.subprocess.Process) -> None:
    await said(lonely, "Prefect does not answer")
    lonely.terminate()
    assert await asyncio.wait_for(lonely.wait(), 12) == 0
