"""Artifacts that an operator has turned off."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.artifacts import Artifact

from blocks.settings import Settings
from tasks.artifacts import show
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
    await close_fleet()
    away = {"prefect_url": "http://127.0.0.1:9/api", "prefect_auth": "a:b"}
    await current_fleet(Settings(home=tmp_path, join_token="t", artifacts=wanted, **away))
    try:
        await show(JobRun("runs/1"), "chat", ANSWER, result_path="/v1/runs/1/result")
    finally:
        await close_fleet()
    assert made == (["chat-completion", "chat-result"] if wanted else [])
