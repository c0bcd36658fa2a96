"""Pipelines as jobs, on a whole installation."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

CLIP = Path(__file__).parent.parent / "data" / "speech" / "question.wav"


def chat(content: str, model: str = "echo", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"task": "chat", "model": model, "parameters": {"messages": messages}, **more}


async def handed_in(http: httpx.AsyncClient, steps: dict[str, Any], **more: Any) -> str:
    body = {"pipeline": {"name": "test", "steps": steps, **more.pop("pipeline", {})}, **more}
    answer = await http.post("/v1/pipelines", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def over(http: httpx.AsyncClient, job: str, timeout_s: float = 60) -> dict[str, Any]:
    async with asyncio.timeout(timeout_s):
        while (seen := (await http.get(f"/v1/jobs/{job}")).json())["status"] in ("accepted", "running"):
            await asyncio.sleep(0.1)
    return dict(seen)


async def step(http: httpx.AsyncClient, job: str, name: str) -> dict[str, Any]:
    return dict((await http.get(f"/v1/jobs/{job}/steps/{name}")).raise_for_status().json())


async def tasks_of(prefect: httpx.AsyncClient, run: str, count: int) -> list[tuple[str, str]]:
    """Names and states of the run's task runs, once so many are there: Prefect makes them from events."""
    tasks: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        while len(tasks) < count or any(task["state_type"] != "COMPLETED" for task in tasks):
            found = await prefect.post("/task_runs/filter", json={"flow_runs": {"id": {"any_": [run]}}})
            tasks = found.raise_for_status().json()
            await asyncio.sleep(0.2)
    return [(task["name"], task["state_type"]) for task in tasks]


async def test_a_spoken_question_is_answered_step_by_step(
    http: httpx.AsyncClient, prefect: httpx.AsyncClient
) -> None:
    text = """
    name: spoken question
    inputs:
      question: {type: recording}
      words: {type: integer}
    steps:
      transcribe: {task: transcribe, parameters: {file: $inputs.question}}
      answer:
        task: chat
        model: echo
        parameters:
          max_tokens: $inputs.words
          messages: [{role: user, content: "You asked: ${transcribe.text} In ${transcribe.language}, $$1."}]
      shout: {task: chat, model: echo, priority: low, parameters: {messages: [
        {role: user, content: $answer.text}]}}
    """
    form = {"pipeline": ("p.yaml", text.encode()), "inputs.question": ("q.wav", CLIP.read_bytes())}
    headers = {"Idempotency-Key": f"once-{time.time_ns()}"}
    answer = await http.post("/v1/pipelines", files=form, data={"inputs.words": "6"}, headers=headers)
    assert answer.status_code == 202, answer.text
    again = await http.post("/v1/pipelines", files=form, data={"inputs.words": "6"}, headers=headers)
    assert again.json()["id"] == answer.json()["id"]
    other = await http.post("/v1/pipelines", files=form, data={"inputs.words": "7"}, headers=headers)
    assert other.status_code == 409

    job = await over(http, answer.json()["id"])
    assert job["status"] == "succeeded", job["error"]
    assert job["model"] == "whisper-tiny.en"  # the heaviest
    result = (await http.get(f"/v1/jobs/{job['id']}/result")).json()
    heard = result["steps"]["transcribe"]["result"]["text"]
    assert "capital of france" in heard.lower()
    said = result["steps"]["answer"]["result"]["text"]
    assert said == " ".join(f"You asked: {heard} In en, $1.".split()[:6])
    assert result["steps"]["shout"]["result"]["text"] == said
    assert [found["name"] for found in job["steps"]] == ["transcribe", "answer", "shout"]
    assert {found["status"] for found in job["steps"]} == {"succeeded"}
    assert all(found["node"] for found in job["steps"])
    assert (await step(http, job["id"], "answer"))["result"]["text"] == said

    run = (await prefect.get(f"/flow_runs/{job['flow_run_id']}")).raise_for_status().json()
    assert run["name"] == f"pipeline spoken question for first ({job['request_id']})"
    ended = dict(await tasks_of(prefect, job["flow_run_id"], 9))
    assert {ended[name] for name in ("transcribe", "answer", "shout")} == {"COMPLETED"}


async def becomes(http: httpx.AsyncClient, job: str, **wanted: str) -> dict[str, Any]:
    """The job's steps by name, once each of `wanted` has that status or stage."""
    async with asyncio.timeout(60):
        while True:
            steps = (await http.get(f"/v1/jobs/{job}")).json().get("steps", [])
            at = {found["name"]: found for found in steps}
            if all(
                name in at and word in (at[name]["status"], at[name]["stage"])
                for name, word in wanted.items()
            ):
                return at
            await asyncio.sleep(0.1)


async def test_independent_steps_run_side_by_side_each_as_soon_as_it_can(
    http: httpx.AsyncClient, single_taken: Any
) -> None:
    async with single_taken():
        job = await handed_in(
            http,
            {
                "slow": chat("one", "echo-single"),  # as long as its slot is taken
                "quick": chat("two"),
                "next": chat("${quick.text}"),
                "last": chat("x", after=["slow", "next"]),
            },
        )
        at = await becomes(http, job, slow="queued", quick="succeeded", next="succeeded")
        assert "last" not in at
    seen = await over(http, job)
    assert seen["status"] == "succeeded", seen["error"]
    at = {found["name"]: found for found in seen["steps"]}
    assert at["last"]["started_at"] >= max(at["slow"]["ended_at"], at["next"]["ended_at"])


async def test_a_step_has_its_own_priority(http: httpx.AsyncClient, single_taken: Any) -> None:
    async with single_taken():
        job = await handed_in(
            http,
            {
                "low": chat("one two", "echo-single", priority="low"),
                "later": chat("word " * 20, "echo-slow"),
                "high": chat("one two", "echo-single", priority="high", after=["later"]),
            },
        )
        await becomes(http, job, low="queued", high="queued")
    seen = await over(http, job)
    assert seen["status"] == "succeeded", seen["error"]
    at = {found["name"]: found for found in seen["steps"]}
    assert at["low"]["started_at"] < at["high"]["started_at"]
    assert at["high"]["ended_at"] < at["low"]["ended_at"]


async def test_a_failed_step_fails_those_that_need_it_and_no_other(http: httpx.AsyncClient) -> None:
    job = await handed_in(
        http,
        {
            "long": chat("word " * 20, "echo-slow"),
            "broken": chat("a crash here", "echo-crash"),
            "needs": chat("It says ${broken.text}"),
            "too": chat("x", after=["needs"]),
            "fine": chat("${long.text}"),
        },
    )
    seen = await over(http, job)
    assert seen["status"] == "failed"
    error = seen["error"]
    assert error["code"] == "steps_failed"
    assert "1 of 5 steps failed: broken (runner_died)" in error["message"]
    assert "skipped, as they need it: needs, too" in error["message"]
    refused = await http.get(f"/v1/jobs/{job}/result")
    assert refused.status_code == 500
    assert refused.json()["error"]["code"] == "steps_failed"
    ended = {found["name"]: found["status"] for found in seen["steps"]}
    assert ended == {
        "long": "succeeded",
        "broken": "failed",
        "needs": "skipped",
        "too": "skipped",
        "fine": "succeeded",
    }
    assert (seen["attempt"], error["retryable"]) == (3, True)  # as its only failed step's error is
    broken = await step(http, job, "broken")
    assert broken["attempts"] == 3  # a runner that died is worth another try
    assert broken["error"]["code"] == "runner_died"
    assert "'broken' failed" in (await step(http, job, "needs"))["error"]["message"]
    assert (await step(http, job, "fine"))["result"]["text"].split() == ["word"] * 20
    unknown = await http.get(f"/v1/jobs/{job}/steps/nothing")
    assert unknown.status_code == 404
    assert "there are: long, broken" in unknown.json()["error"]["message"]


async def test_a_result_that_does_not_fit_after_all_is_told_by_the_parameter(http: httpx.AsyncClient) -> None:
    pipeline = {"inputs": {"words": {"type": "integer", "default": 1}}}
    count = chat("one two three")
    job = await handed_in(
        http,
        {
            "count": {**count, "parameters": {**count["parameters"], "max_tokens": "$inputs.words"}},
            "voice": {
                "task": "chat",
                "model": "echo",
                "parameters": {
                    "messages": [{"role": "user", "content": "x"}],
                    "temperature": "$count.prompt_tokens",
                },
            },
        },
        pipeline=pipeline,
        inputs={"words": 2},
    )
    seen = await over(http, job)
    assert seen["status"] == "failed"
    failed = await step(http, job, "voice")
    assert (failed["attempts"], seen["attempt"]) == (1, 1)  # trying again would not help
    shown = next(found for found in seen["steps"] if found["name"] == "voice")
    assert shown["error"] == failed["error"]
    assert [shown[name] for name in ("status", "model", "node")] == [
        failed[name] for name in ("status", "model", "node")
    ]
    assert failed["started_at"] - 1 < shown["started_at"] <= failed["ended_at"] <= shown["ended_at"] + 1
    assert failed["error"]["param"] == "steps.voice.parameters.temperature"
    assert "less than or equal to 2" in failed["error"]["message"]


async def test_cancelling_the_job_cancels_all_running_steps(http: httpx.AsyncClient) -> None:
    long = "word " * 2000
    job = await handed_in(
        http, {"a": chat(long, "echo-slow"), "b": chat(long, "echo-slow"), "c": chat("${a.text}")}
    )
    async with asyncio.timeout(30):
        while len((seen := (await http.get(f"/v1/jobs/{job}")).json()).get("steps", [])) < 2:
            await asyncio.sleep(0.1)
    assert seen["status"] == "running"
    unfinished = await http.get(f"/v1/jobs/{job}/steps/a")
    assert unfinished.status_code == 409
    assert "not finished" in unfinished.json()["error"]["message"]
    (await http.post(f"/v1/jobs/{job}/cancel")).raise_for_status()
    seen = await over(http, job, 15)
    assert seen["status"] == "cancelled"
    assert {found["status"] for found in seen["steps"]} == {"cancelled"}


async def test_steps_that_nobody_has_room_for_wait(
    http: httpx.AsyncClient, prefect: httpx.AsyncClient
) -> None:
    words = " ".join(["word"] * 40)  # 2 s each, one at a time, one in the queue
    job = await handed_in(http, {f"s{number}": chat(words, "echo-narrow") for number in range(6)})
    stages = set()
    async with asyncio.timeout(90):
        while (seen := (await http.get(f"/v1/jobs/{job}")).json())["status"] in ("accepted", "running"):
            stages |= {found["stage"] for found in seen.get("steps", [])}
            await asyncio.sleep(0.1)
    assert (seen["status"], seen["attempt"]) == ("succeeded", 1), seen["error"]
    assert "waiting" in stages
    ended = [await step(http, job, found["name"]) for found in seen["steps"]]
    assert [found["attempts"] for found in ended] == [1] * 6
    logs: list[str] = []
    async with asyncio.timeout(30):
        while not any("waiting: overloaded" in message for message in logs):
            wanted = {"logs": {"flow_run_id": {"any_": [seen["flow_run_id"]]}}}
            found = (await prefect.post("/logs/filter", json=wanted)).raise_for_status().json()
            logs = [log["message"] for log in found]
            await asyncio.sleep(0.2)


async def test_a_step_that_waits_can_be_cancelled(http: httpx.AsyncClient) -> None:
    long = "word " * 2000
    job = await handed_in(http, {f"s{number}": chat(long, "echo-narrow") for number in range(3)})
    async with asyncio.timeout(30):
        while "waiting" not in {
            found["stage"] for found in (await http.get(f"/v1/jobs/{job}")).json()["steps"]
        }:
            await asyncio.sleep(0.1)
    (await http.post(f"/v1/jobs/{job}/cancel")).raise_for_status()
    seen = await over(http, job, 15)
    assert seen["status"] == "cancelled"
    assert {found["status"] for found in seen["steps"]} == {"cancelled"}


async def test_a_modest_body_does_not_hold_up_the_api(http: httpx.AsyncClient) -> None:
    filled = {"name": "a", "inputs": {"a": {"type": "string"}}, "steps": {"x": chat("${inputs.a} " * 990)}}
    body = {"pipeline": filled, "inputs": {"a": "x" * 90_000}}
    answers, slowest = [asyncio.create_task(http.post("/v1/pipelines", json=body)) for _ in range(4)], 0.0
    while not all(answer.done() for answer in answers):
        asked = time.monotonic()
        (await http.get("/v1/models")).raise_for_status()
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < 10
    for answer in answers:
        error = (await answer).json()["error"]
        assert error["param"] == "steps.x.parameters.messages[0].content"
        assert "characters; refer to less" in error["message"]
    large = await http.post("/v1/pipelines", content=json.dumps({"pipeline": "x" * 600_000, "inputs": {}}))
    assert large.status_code == 413


async def test_results_are_not_filled_in_without_end(http: httpx.AsyncClient) -> None:
    text = "word " * 1500
    job = await handed_in(http, {"a": chat(text), "b": chat("${a.text}" * 900)})
    seen = await over(http, job)
    failed = await step(http, job, "b")
    assert (seen["status"], seen["attempt"]) == ("failed", 1)
    assert failed["error"]["param"] == "steps.b.parameters.messages[0].content"
    assert "stand for more than 4000000 characters" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ('{"pipeline": {"name": "a", "steps": {"x": {}, "x": {}}}}', "x", "stands twice"),
        ('{"pipeline": "name: a\\nname: b"}', "pipeline", "duplicate key"),
        ('{"pipeline": "[1]"}', "pipeline", "must be an object"),
        ('{"pipeline": {"name": "a", "steps": {}}, "input": {}}', "input", "not a parameter"),
        ('{"inputs": {}}', "pipeline", "is missing"),
        (
            '{"pipeline": {"name": "a", "steps": {"x": {"task": "speak"}}}, "priority": "top"}',
            "priority",
            "high",
        ),
    ],
)
async def test_bodies_that_are_no_pipeline(http: httpx.AsyncClient, body: str, param: str, said: str) -> None:
    answer = await http.post("/v1/pipelines", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"inputs.a": "x"}, "pipeline"),
        ({"pipeline": "name: a\nsteps: {}", "more": "x"}, "more"),
        ({"pipeline": "name: a\nsteps: {x: {task: nothing}}", "priority": "top"}, "priority"),
        ({"pipeline": "name: a\ninputs: {n: {type: integer}}\nsteps: {}", "inputs.n": "many"}, "inputs.n"),
        ({"pipeline": "name: a\ninputs: {n: {type: integer}}\nsteps: {}", "inputs.n": b"file"}, "inputs.n"),
        ({"pipeline": "name: a\ninputs: {n: {type: picture}}\nsteps: {}", "inputs.n": b""}, "inputs.n"),
        ({"pipeline": b"\xff\xfe"}, "pipeline"),
    ],
)
async def test_forms_that_are_no_pipeline(http: httpx.AsyncClient, form: dict[str, Any], param: str) -> None:
    files = {
        name: ("file", value) if isinstance(value, bytes) else (None, value) for name, value in form.items()
    }
    answer = await http.post("/v1/pipelines", files=files)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_no_job_reads_a_file_that_its_request_names(http: httpx.AsyncClient) -> None:
    pipeline = {
        "name": "a",
        "inputs": {"q": {"type": "recording"}},
        "steps": {"hear": {"task": "transcribe", "parameters": {"file": "$inputs.q"}}},
    }
    for named in ({"path": "/etc/passwd"}, {"reference": "jobs/job_other/inputs/file"}):
        parameters = {"pipeline": pipeline, "inputs": {"q": named}}
        answer = await http.post("/v1/jobs", json={"flow": "pipeline", "parameters": parameters})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "inputs.q"
    assert "passwd" not in json.dumps((await http.get("/v1/jobs")).json())
