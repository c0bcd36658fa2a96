"""What people look at in Prefect; and runs that Prefect's UI or a schedule starts, which have no key."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from blocks.settings import Settings
from blocks.storage import Picture, Storage
from deployments.jobs.stored import OfNoJob
from tasks.artifacts import artifacts, harmless, key
from tasks.image import Image
from tasks.prefect_api import TERMINAL
from tasks.text import Completion

QUESTION = Path(__file__).parent.parent / "data" / "speech" / "question.wav"


async def shown(prefect: httpx.AsyncClient, run_id: str) -> dict[str, dict[str, Any]]:
    """The artifacts of a run, by key."""
    body = {"artifacts": {"flow_run_id": {"any_": [run_id]}}}
    answer = (await prefect.post("/artifacts/filter", json=body)).raise_for_status()
    return {artifact["key"]: artifact for artifact in answer.json()}


async def started(prefect: httpx.AsyncClient, flow: str, request: dict[str, Any]) -> dict[str, Any]:
    """A run as Prefect's UI starts it, once it is over."""
    deployment = (await prefect.get(f"/deployments/name/{flow}/smi")).raise_for_status().json()
    path = f"/deployments/{deployment['id']}/create_flow_run"
    made = await prefect.post(path, json={"parameters": {"request": request}, "state": {"type": "SCHEDULED"}})
    run = made.raise_for_status().json()
    async with asyncio.timeout(90):
        while run["state_type"] not in TERMINAL:
            await asyncio.sleep(0.1)
            run = (await prefect.get(f"/flow_runs/{run['id']}")).raise_for_status().json()
    return dict(run)


async def test_transcript_and_answer_are_on_the_runs_page(client: Any, prefect: httpx.AsyncClient) -> None:
    answer = await client.http.post(
        "/v1/jobs",
        data={"flow": "converse", "model": "echo"},
        files={"file": ("q.wav", QUESTION.read_bytes())},
    )
    job = await client.over(answer.json(), timeout_s=120)
    transcript = (await client.result(job))["transcript"]
    found = await shown(prefect, job["flow_run_id"])
    assert found.keys() == {"converse-conversation"}
    artifact = found["converse-conversation"]
    assert artifact["type"] == "markdown"
    assert artifact["data"] == f"### Transcript\n\n{transcript}\n\n### Answer\n\n{transcript}"


async def test_a_long_step_shows_how_far_it_is(
    client: Any, prefect: httpx.AsyncClient, single_taken: Any
) -> None:
    async with single_taken():
        job = await client.chat("one", model="echo-single")
        found: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(60):
            while "progress-generate" not in found:
                await asyncio.sleep(0.2)
                run_id = (await client.get(job))["flow_run_id"]
                found = await shown(prefect, run_id) if run_id else {}
        seen = await client.get(job)
        assert seen["status"] == "running"
        assert found["progress-generate"]["data"] < 100
    await client.over(job)
    found = await shown(prefect, seen["flow_run_id"])
    assert (found["progress-generate"]["type"], found["progress-generate"]["data"]) == ("progress", 100)
    assert "succeeded" in found["progress-generate"]["description"]


async def test_a_live_run_shows_no_content(client: Any, prefect: httpx.AsyncClient) -> None:
    request = f"req-{time.time_ns()}"
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
    answer = await client.http.post("/v1/chat/completions", json=body, headers={"x-request-id": request})
    assert answer.status_code == 200
    runs: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while not runs:
            await asyncio.sleep(0.2)
            wanted = {"flow_runs": {"tags": {"any_": [request]}}}
            runs = (await prefect.post("/flow_runs/filter", json=wanted)).json()
    assert runs[0]["name"] in (f"chat echo for first ({request})", f"chat for first ({request})")
    assert await shown(prefect, runs[0]["id"]) == {}


async def test_a_run_from_the_ui_reads_no_local_file(prefect: httpx.AsyncClient) -> None:
    run = await started(prefect, "transcribe", {"file": {"path": str(QUESTION)}})
    assert run["state_type"] == "FAILED"
    assert "SMI_LOCAL_FILES" in run["state"]["message"]


async def test_a_run_from_the_ui_leaves_its_result_where_its_page_leads(
    prefect: httpx.AsyncClient, settings: Settings
) -> None:
    run = await started(prefect, "speak", {"model": "tts-1", "input": "Hello.", "response_format": "wav"})
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["name"].endswith(" for system")
    stored = json.loads(Storage(settings.storage).read(OfNoJob(run["id"]).result))
    assert stored["audio"]["reference"] == f"runs/{run['id']}/files/say/speech.wav"
    found = await shown(prefect, run["id"])
    assert {name: artifact["type"] for name, artifact in found.items()} == {
        "speak-audio": "markdown",
        "speak-result": "markdown",
    }
    async with httpx.AsyncClient(trust_env=False) as browser:
        sound = await browser.get(link_in(found["speak-audio"]))
        assert (sound.status_code, sound.headers["content-type"]) == (200, "audio/wav")
        assert sound.content.startswith(b"RIFF")
        whole = await browser.get(link_in(found["speak-result"]))
        assert whole.json() == stored
        assert (await browser.get(link_in(found["speak-result"]).partition("?")[0])).status_code == 401


def link_in(artifact: dict[str, Any]) -> str:
    """Of `[text](url)`, which is how Prefect keeps a link."""
    return str(artifact["data"]).partition("](")[2].rstrip(")")


async def test_nobodys_run_is_not_somebodys_with_a_key(client: Any, prefect: httpx.AsyncClient) -> None:
    run = await started(prefect, "chat", {"model": "echo", "messages": [{"role": "user", "content": "x"}]})
    assert run["state_type"] == "COMPLETED"
    answer = await client.http.get(f"/v1/runs/{run['id']}/result")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")


async def test_a_run_from_the_ui_may_not_leave_the_house(
    prefect: httpx.AsyncClient, settings: Settings
) -> None:
    run = await started(prefect, "chat", {"model": "outside", "messages": [{"role": "user", "content": "x"}]})
    assert run["state_type"] == "FAILED"
    assert "model 'outside' is outside (tier cloud)" in run["state"]["message"]
    failure = json.loads(Storage(settings.storage).read(OfNoJob(run["id"]).error))
    assert (failure["code"], failure["param"]) == ("permission_denied", "model")


@pytest.mark.parametrize(
    ("names", "found"),
    [(("chat", "Completion"), "chat-completion"), (("a b", "ü_C"), "a-b-c"), (("é",), "result")],
)
def test_a_key_is_one_that_prefect_takes(names: tuple[str, ...], found: str) -> None:
    assert key(*names) == found


def test_a_text_brings_no_tags_and_no_pictures_of_others() -> None:
    text = harmless("a <img src=x> ![p](http://evil/?q=1) **b** [c](d)")
    assert "<" not in text
    assert "![" not in text
    assert "**b** [c](d)" in text


def test_parts_of_a_text_are_not_shown_twice_and_long_ones_say_that_they_are_cut(settings: Settings) -> None:
    made = Image(
        picture=Picture(reference="runs/1/files/a.png", name="a.png", content_type="image/png", size=1),
        width=1,
        height=1,
    )
    (image,) = artifacts(settings, "runs/1", "cutout", made)
    assert (image.type, image.key) == ("image", "cutout-picture")
    answer = Completion(text="x" * 300_000, finish_reason="stop", prompt_tokens=1, completion_tokens=1)
    (text,) = artifacts(settings, "runs/1", "chat", answer)
    assert "cut here" in text.markdown[-100:]
