"""Which flows a worker runs, and how a run that it hosts ends. With a whole installation: tests/jobs."""

import asyncio
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
