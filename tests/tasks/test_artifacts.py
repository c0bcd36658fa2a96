"""Artifacts that an operator has turned off, that Prefect refuses, or that would lead nowhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.artifacts import Artifact
from prefect.exceptions import ObjectNotFound
from pydantic import TypeAdapter

from blocks.settings import Settings
from blocks.storage import Recording
from tasks.artifacts import artifacts, progress_shown, show
from tasks.audio import Speech
from tasks.fleet import close_fleet, current_fleet
from tasks.job import JobRun
from tasks.text import Completion

ANSWER = Completion(text="hello", finish_reason="stop", prompt_tokens=1, completion_tokens=1)


@pytest.mark.parametrize("wanted", [True, False])
async def test_content_is_shown_unless_it_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    made = []

    async def acreate(artifact: Artifact) -> None:
        made.append(artifact.key)

    monkeypatch.setattr(Artifact, "acreate", acreate)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1")
    await close_fleet()
    away = {"prefect_url": "http://127.0.0.1:9/api", "prefect_auth": "a:b"}
    await current_fleet(Settings(home=tmp_path, join_token="t", artifacts=wanted, **away))
    try:
        await show(JobRun("runs/1"), "chat", ANSWER, result_path="/v1/runs/1/result")
    finally:
        await close_fleet()
    assert made == (["chat-completion", "chat-result"] if wanted else [])


def refused() -> None:
    raise ObjectNotFound(http_exc=OSError("no such run"))


def not_understood() -> None:
    TypeAdapter(int).validate_python("x")


@pytest.mark.parametrize("fail", [refused, not_understood])
async def test_a_prefect_that_takes_no_artifact_fails_no_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[], None],
) -> None:
    async def acreate(artifact: Artifact) -> None:
        fail()

    monkeypatch.setattr(Artifact, "acreate", acreate)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1")
    await close_fleet()
    away = {"prefect_url": "http://127.0.0.1:9/api", "prefect_auth": "a:b"}
    await current_fleet(Settings(home=tmp_path, join_token="t", **away))
    run = JobRun("runs/1")
    try:
        await show(run, "chat", ANSWER)
    finally:
        await close_fleet()
    assert "is not shown in Prefect" in caplog.text
    assert run.shown == []


def test_no_link_is_shown_to_a_file_that_the_api_does_not_have(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, join_token="t")
    sound = Recording(reference="runs/1/x/files/a.wav", name="a.wav", content_type="audio/wav", size=1)
    made = Speech(audio=sound, seconds=1)
    assert len(list(artifacts(settings, "runs/1/x", "speak", made))) == 1
    assert list(artifacts(settings, None, "speak", made)) == []


async def test_who_cancels_a_run_does_not_wait_for_a_slow_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled pipeline stayed `running` for 10 s and more."""

    async def slow(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("tasks.artifacts._update", slow)
    begun = asyncio.Event()

    async def work() -> None:
        async with progress_shown(JobRun("jobs/job_1", "req_1")):
            begun.set()
            await asyncio.sleep(60)

    run = asyncio.create_task(work())
    await begun.wait()
    cancelled = time.monotonic()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - cancelled < 5
