"""The main job, through every layer, on a whole installation."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

SPEECH = Path(__file__).parent.parent / "data" / "speech"


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


async def job_done(http: httpx.AsyncClient, job: str, timeout_s: float = 120) -> dict[str, Any]:
    async with asyncio.timeout(timeout_s):
        while True:
            found = (await http.get(f"/v1/jobs/{job}")).json()
            if found["status"] in ("succeeded", "failed", "cancelled"):
                return dict(found)
            await asyncio.sleep(0.2)


async def runs_of(prefect: httpx.AsyncClient, *requests: str) -> list[dict[str, Any]]:
    found = await prefect.post(
        "/flow_runs/filter", json={"flow_runs": {"tags": {"any_": list(requests)}}, "limit": 200}
    )
    found.raise_for_status()
    return list(found.json())


async def recorded(
    prefect: httpx.AsyncClient, *names: str, timeout_s: float, state: str = "COMPLETED"
) -> list[dict[str, Any]]:
    """The runs of requests with these ids, once all are there and in `state`."""
    runs: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            while len(runs) < len(names) or any(run["state_type"] != state for run in runs):
                parts = [names[at : at + 100] for at in range(0, len(names), 100)]
                runs = [run for part in parts for run in await runs_of(prefect, *part)]
                await asyncio.sleep(0.2)
    except TimeoutError:
        states = [run["state_type"] for run in runs]
        raise AssertionError(f"{len(runs)} of {len(names)} runs, in {set(states)}") from None
    return runs


async def steps_of(prefect: httpx.AsyncClient, run: str, count: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    async with asyncio.timeout(15):
        while len(steps) < count or any(step["state_type"] != "COMPLETED" for step in steps):
            found = await prefect.post("/task_runs/filter", json={"flow_runs": {"id": {"any_": [run]}}})
            steps = found.json()
            await asyncio.sleep(0.2)
    return steps


async def test_a_spoken_question_is_transcribed_and_answered_as_a_job(
    http: httpx.AsyncClient, prefect: httpx.AsyncClient
) -> None:
    audio = (SPEECH / "question.wav").read_bytes()
    accepted = await http.post(
        "/v1/jobs", data={"flow": "converse", "max_tokens": "24"}, files={"file": ("q.wav", audio)}
    )
    assert accepted.status_code == 202, accepted.text
    job = await job_done(http, accepted.json()["id"])
    assert job["status"] == "succeeded", job
    result = (await http.get(f"/v1/jobs/{job['id']}/result")).json()
    said = words((SPEECH / "question.txt").read_text())
    assert words(result["transcript"]) == said
    assert result["answer"]["completion_tokens"] > 0
    assert result["answer"]["text"].strip()

    (run,) = await recorded(prefect, accepted.headers["x-request-id"], timeout_s=10)
    assert run["work_pool_name"] == "cpu"
    assert {accepted.headers["x-request-id"], job["id"]} <= set(run["tags"])
    names = {step["name"].rsplit("-", 1)[0] for step in await steps_of(prefect, run["id"], 4)}
    assert names == {"hear", "generate", "dispatch"}
    assert "transcript" not in str(run["parameters"])


async def test_the_same_question_is_answered_live_and_streamed(
    client: openai.AsyncOpenAI, prefect: httpx.AsyncClient
) -> None:
    name = f"live-{time.time_ns()}"
    stream = await client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": name},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage.completion_tokens > 3

    (run,) = await recorded(prefect, name, timeout_s=5)
    steps = await steps_of(prefect, run["id"], 2)
    assert {step["name"] for step in steps} == {"generate", "dispatch"}
    assert {name, "live", "tier:local", "model:smollm2-135m"} <= set(run["tags"])
    assert run["name"].startswith("chat ")
    assert run["name"].endswith(f"for first ({name})")
    assert run["labels"]["completion_tokens"] == chunks[-1].usage.completion_tokens
    assert "France" not in str(run)


async def ask(client: openai.AsyncOpenAI, name: str, model: str = "echo", **more: Any) -> str:
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"say {name}"}],
        extra_headers={"x-request-id": name},
        **more,
    )
    return answer.choices[0].message.content or ""


async def paced(client: openai.AsyncOpenAI, names: list[str], per_second: float) -> None:
    """Ask as `names`, so many a second, whether or not earlier ones are answered."""
    started = time.monotonic()
    asked = []
    for number, name in enumerate(names):
        await asyncio.sleep(max(0, started + number / per_second - time.monotonic()))
        asked.append(asyncio.create_task(ask(client, name)))
    for name, answer in zip(names, await asyncio.gather(*asked), strict=True):
        assert answer == f"say {name}"


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_each_of_20_live_chats_a_second_is_recorded_at_most_2_s_behind(
    client: openai.AsyncOpenAI, prefect: httpx.AsyncClient, count: int
) -> None:
    names = [f"paced-{count}-{number}-{time.time_ns()}" for number in range(count)]
    await ask(client, f"warm-{time.time_ns()}")
    await paced(client, names, 20)
    runs = await recorded(prefect, *names, timeout_s=2.5)
    behind = [_written(run) - run["labels"]["ended"] for run in runs]
    assert max(behind) <= 2, sorted(behind)[-5:]


def _written(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["end_time"]).timestamp()


async def test_a_burst_of_200_is_answered_without_waiting_for_prefect_and_recorded_later(
    client: openai.AsyncOpenAI, prefect: httpx.AsyncClient
) -> None:
    names = [f"burst-{number}-{time.time_ns()}" for number in range(200)]
    started = time.monotonic()
    answers = await asyncio.gather(*(ask(client, name) for name in names))
    took = time.monotonic() - started
    assert answers == [f"say {name}" for name in names]
    assert took < 5
    await recorded(prefect, *names, timeout_s=20)


async def test_streams_do_not_stutter_while_the_worker_executes_flows(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    async def gaps() -> float:
        stream = await client.chat.completions.create(
            model="echo-paced",
            messages=[{"role": "user", "content": " ".join(["word"] * 150)}],
            stream=True,
        )
        times = []
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.perf_counter())
        between = sorted(later - sooner for sooner, later in pairwise(times))
        return between[int(len(between) * 0.99)]

    idle = await gaps()
    body = {"flow": "chat", "parameters": {"model": "echo", "messages": [{"role": "user", "content": "x"}]}}
    jobs = [(await http.post("/v1/jobs", json=body)).json()["id"] for _ in range(4)]
    busy = await gaps()
    for job in jobs:
        assert (await job_done(http, job))["status"] == "succeeded"
    assert busy - idle <= 0.010, (idle, busy)


async def test_the_run_page_shows_both_by_request_id(
    smi: Any, client: openai.AsyncOpenAI, prefect: httpx.AsyncClient, prefect_ui: Any, tmp_path: Path
) -> None:
    name = f"seen-{time.time_ns()}"
    await ask(client, name)
    (run,) = await recorded(prefect, name, timeout_s=5)
    await steps_of(prefect, run["id"], 2)  # the page itself looks again only after 30 s
    await prefect_ui.open(f"{smi.prefect_url.removesuffix('/api')}/runs/flow-run/{run['id']}?tab=Task%20Runs")
    await prefect_ui.text_with(name, "Completed", "generate")
    await prefect_ui.picture(tmp_path / "run-page.png")
    assert (tmp_path / "run-page.png").stat().st_size > 10_000


async def test_the_run_page_shows_the_answer_and_the_picture_opens(
    smi: Any, http: httpx.AsyncClient, prefect_ui: Any, tmp_path: Path
) -> None:
    audio, ui = (SPEECH / "question.wav").read_bytes(), smi.prefect_url.removesuffix("/api")
    asked = {"flow": "converse", "model": "echo"}
    heard = await http.post("/v1/jobs", data=asked, files={"file": ("q.wav", audio)})
    asked = {"flow": "upscale", "scale": "4"}
    enlarged = await http.post("/v1/jobs", data=asked, files={"file": ("red.png", red_png())})
    job = await job_done(http, heard.json()["id"])
    said = (await http.get(f"/v1/jobs/{job['id']}/result")).json()["transcript"].strip()
    await prefect_ui.open(f"{ui}/runs/flow-run/{job['flow_run_id']}")
    await prefect_ui.text_with("converse echo for ")
    await click(prefect_ui, "#artifacts")
    await click(prefect_ui, "a[href*='/artifacts/artifact/']")
    await prefect_ui.text_with("Transcript", "Answer", said)
    await prefect_ui.picture(tmp_path / "answer.png")

    job = await job_done(http, enlarged.json()["id"])
    await prefect_ui.open(f"{ui}/runs/flow-run/{job['flow_run_id']}")
    await prefect_ui.text_with("upscale realesr")
    await click(prefect_ui, "#artifacts")
    await click(prefect_ui, "a[href*='/artifacts/artifact/']")
    width = "[...document.images].find(image => image.src.includes('/v1/jobs/'))?.naturalWidth"
    async with asyncio.timeout(30):
        while await prefect_ui.script(width) != 32:
            await asyncio.sleep(0.2)
    await prefect_ui.picture(tmp_path / "picture.png")


async def click(page: Any, selector: str) -> None:
    """Click on the first element that the selector finds, once there is one."""
    found = f"document.querySelector({json.dumps(selector)})"
    async with asyncio.timeout(30):
        while not await page.script(f"{found} ? ({found}.click(), true) : false"):
            await asyncio.sleep(0.2)


def red_png() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(made, "PNG")
    return made.getvalue()


def pid_of(smi: Any, name: str) -> int:
    state = json.loads((smi.home / "state.json").read_text())
    return next(process["pid"] for process in state["processes"] if process["name"] == name)


async def answered(http: httpx.AsyncClient, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                (await http.get("/health")).raise_for_status()
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
            else:
                return


async def test_chat_goes_on_while_prefect_is_away_and_records_arrive_later_in_order(
    smi: Any, client: openai.AsyncOpenAI, prefect: httpx.AsyncClient
) -> None:
    names = [f"away-{number}-{time.time_ns()}" for number in range(40)]
    os.kill(pid_of(smi, "prefect"), signal.SIGKILL)
    await paced(client, names[:20], 10)
    for name in names[20:]:
        started = time.monotonic()
        assert await ask(client, name) == f"say {name}"
        assert time.monotonic() - started < 0.5
    await answered(prefect, 60)
    runs = {run["labels"]["request_id"]: run for run in await recorded(prefect, *names, timeout_s=60)}
    created = [datetime.fromisoformat(runs[name]["created"]) for name in names]
    assert created == sorted(created)


async def test_an_api_started_while_prefect_is_away_still_answers(
    smi: Any, client: openai.AsyncOpenAI, http: httpx.AsyncClient, prefect: httpx.AsyncClient
) -> None:
    away = pid_of(smi, "prefect")
    os.kill(away, signal.SIGSTOP)
    try:
        os.kill(pid_of(smi, "api"), signal.SIGKILL)
        await answered(http, 30)
        name = f"restarted-{time.time_ns()}"
        assert await ask(client, name) == f"say {name}"
    finally:
        os.kill(away, signal.SIGCONT)
    await recorded(prefect, name, timeout_s=20)
