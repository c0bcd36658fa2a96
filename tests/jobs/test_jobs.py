"""Jobs through a whole installation."""

import asyncio
import io
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic_core import PydanticSerializationError
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from blocks.settings import Settings
from blocks.storage import Storage
from deployments.api.intake import _accepted, input_reference
from deployments.jobs.store import Jobs, Submission, new_job_id
from deployments.jobs.stored import Stored, StoredRequest
from tasks.principal import SYSTEM

SECRET = "zanzibar-7391"
PARAMETERS = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


def words(number: int) -> str:
    return " ".join(f"w{index}" for index in range(number))


async def known_to_prefect(prefect: httpx.AsyncClient, run_id: str) -> str:
    """All that Prefect's API says of a run, but for artifacts, which are there to show content."""
    of_run = {"flow_runs": {"id": {"any_": [run_id]}}}
    answers = [
        await prefect.get(f"/flow_runs/{run_id}"),
        await prefect.get("/flow_run_states/", params={"flow_run_id": run_id}),
        await prefect.post("/task_runs/filter", json=of_run),
        await prefect.post("/logs/filter", json={"logs": {"flow_run_id": {"any_": [run_id]}}}),
    ]
    events = (await prefect.post("/events/filter", json={})).raise_for_status().json()["events"]
    others = [event for event in events if not event["event"].startswith("prefect.artifact")]
    return "\n".join([*(answer.raise_for_status().text for answer in answers), json.dumps(others)])


async def test_a_chat_job_runs_and_its_content_stays_out_of_prefect(
    client: Any, prefect: httpx.AsyncClient
) -> None:
    job = await client.over(await client.chat(f"say {SECRET}"))
    assert (job["status"], job["attempt"], job["error"]) == ("succeeded", 1, None)
    result = await client.result(job)
    assert (result["text"], result["finish_reason"]) == (f"say {SECRET}", "stop")
    run = (await prefect.get(f"/flow_runs/{job['flow_run_id']}")).json()
    assert (run["name"], run["state_type"], run["work_queue_name"]) == (
        f"chat echo for first ({job['request_id']})",
        "COMPLETED",
        "normal",
    )
    assert {"job", job["id"], job["request_id"]} <= set(run["tags"])
    assert run["parameters"] == {"request": Stored.of(job["id"], 1).model_dump()}
    await asyncio.sleep(2.5)  # logs and task runs are sent in batches
    said = await known_to_prefect(prefect, run["id"])
    assert "generate" in said
    assert "Beginning flow run" in said
    assert SECRET not in said


async def test_a_stored_request_that_is_refused_shows_nothing_of_itself(
    prefect: httpx.AsyncClient, settings: Settings
) -> None:
    storage, stored = Storage(settings.storage), Stored.of(f"job_bad{time.time_ns()}")
    bad = {"model": "echo", "messages": [{"role": SECRET, "content": SECRET}]}
    asked = StoredRequest(principal=SYSTEM, request_id="req_bad", request=bad)
    storage.write(stored.reference, asked.model_dump_json().encode())
    deployment = (await prefect.get("/deployments/name/chat/smi")).json()
    run = await created(prefect, deployment, {"request": stored.model_dump()})
    state = await ended(prefect, run)
    assert state["type"] == "FAILED"
    assert "messages[0].role" in state["message"]
    assert json.loads(storage.read(stored.error))["param"] == "messages[0].role"
    await asyncio.sleep(2.5)
    assert SECRET not in await known_to_prefect(prefect, run)


async def created(prefect: httpx.AsyncClient, deployment: dict[str, Any], parameters: Any) -> str:
    """A flow run of that deployment in pool cpu; its id."""
    body = {
        "flow_id": deployment["flow_id"],
        "deployment_id": deployment["id"],
        "parameters": parameters,
        "work_pool_name": "cpu",
        "work_queue_name": "normal",
        "state": {"type": "SCHEDULED"},
    }
    return str((await prefect.post("/flow_runs/", json=body)).raise_for_status().json()["id"])


async def ended(prefect: httpx.AsyncClient, run_id: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            state = (await prefect.get(f"/flow_runs/{run_id}")).json()["state"]
            if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                return dict(state)
            await asyncio.sleep(0.1)


async def test_a_run_from_prefects_own_ui_has_its_parameters_typed(prefect: httpx.AsyncClient) -> None:
    deployment = (await prefect.get("/deployments/name/chat/smi")).json()
    run = await created(prefect, deployment, {"request": PARAMETERS})
    assert (await ended(prefect, run))["type"] == "COMPLETED"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"entrypoint": "os:system"}, "entrypoint"),
        ({"entrypoint": "../../../tmp/evil.py:chat"}, "entrypoint"),
        ({"pull_steps": [{"prefect.deployments.steps.run_shell_script": {"script": "true"}}]}, "pull steps"),
    ],
)
async def test_what_is_not_ours_is_not_run(
    prefect: httpx.AsyncClient, changes: dict[str, Any], cause: str
) -> None:
    ours = (await prefect.get("/deployments/name/chat/smi")).json()
    body = {"name": "evil", "flow_id": ours["flow_id"], "entrypoint": "flows/chat.py:chat", **changes}
    deployment = (await prefect.post("/deployments/", json=body)).raise_for_status().json()
    state = await ended(prefect, await created(prefect, deployment, {"request": PARAMETERS}))
    await prefect.delete(f"/deployments/{deployment['id']}")
    assert state["type"] == "FAILED"
    assert cause in state["message"]
    assert "refused" in state["message"]


async def worked_on(client: Any, prefect: httpx.AsyncClient, job: dict[str, Any]) -> str:
    """The job's flow run, once it is running."""
    async with asyncio.timeout(30):
        while True:
            run_id = (await client.get(job))["flow_run_id"]
            if run_id and (await prefect.get(f"/flow_runs/{run_id}")).json()["state_type"] == "RUNNING":
                return str(run_id)
            await asyncio.sleep(0.05)


async def test_a_cancelled_flow_does_not_run_on(client: Any, prefect: httpx.AsyncClient) -> None:
    job = await client.chat(words(2000), model="echo-slow")
    await worked_on(client, prefect, job)
    asked = time.monotonic()
    assert (await client.http.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 202
    seen = await client.over(job)
    assert seen["status"] == "cancelled"
    assert time.monotonic() - asked < 5
    run = (await prefect.get(f"/flow_runs/{seen['flow_run_id']}")).json()
    assert (run["state_type"], run["state_name"]) == ("CANCELLED", "Cancelled")
    answer = await client.http.get(f"/v1/jobs/{job['id']}/result")
    assert (answer.status_code, "cancelled" in answer.json()["error"]["message"]) == (409, True)


def worker_of(smi: Any) -> psutil.Process:
    for child in psutil.Process(smi.pids["node"]).children():
        with suppress(psutil.NoSuchProcess):  # a runner that ends meanwhile
            if "deployments.node.worker" in child.cmdline():
                return child
    raise AssertionError("the node has no worker")


async def test_a_job_survives_kill_9_of_its_worker(smi: Any, client: Any, prefect: httpx.AsyncClient) -> None:
    job = await client.chat(words(60), model="echo-slow")
    first = await worked_on(client, prefect, job)
    worker_of(smi).kill()
    seen = await client.over(job, timeout_s=90)
    assert (seen["status"], seen["attempt"]) == ("succeeded", 2)
    assert (await client.result(job))["text"] == words(60)
    run = (await prefect.get(f"/flow_runs/{first}")).json()
    assert run["state_type"] == "CRASHED"


async def test_no_job_is_lost_or_doubled_by_kill_9_of_the_processor(
    smi: Any, client: Any, prefect: httpx.AsyncClient
) -> None:
    ours = psutil.Process(smi.pids["jobs"])
    ours.suspend()
    try:
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "deployments", "jobs", "--home", str(smi.home)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        jobs = [await client.chat(f"job {number}") for number in range(6)]
        await client.until(jobs[0], "running", "succeeded")
        other.kill()
        await other.wait()
    finally:
        ours.resume()
    for number, job in enumerate(jobs):
        assert (await client.over(job))["status"] == "succeeded"
        assert (await client.result(job))["text"] == f"job {number}"
        body = {"flow_runs": {"tags": {"all_": [job["id"]]}}}
        runs = (await prefect.post("/flow_runs/filter", json=body)).json()
        assert [run["state_type"] for run in runs] == ["COMPLETED"]


async def test_jobs_are_accepted_while_prefect_hangs_and_run_afterwards(smi: Any, client: Any) -> None:
    running = await client.chat(words(40), model="echo-slow")
    await client.until(running, "running")
    prefect = psutil.Process(smi.pids["prefect"])
    prefect.suspend()
    try:
        asked = time.monotonic()
        waiting = await client.chat("later")
        assert time.monotonic() - asked < 1
        await asyncio.sleep(3)
        assert (await client.get(waiting))["status"] in ("accepted", "running")
    finally:
        prefect.resume()
    for job in (running, waiting):
        seen = await client.over(job)
        assert (seen["status"], seen["attempt"]) == ("succeeded", 1)


async def test_an_idempotency_key_is_good_for_one_job(client: Any) -> None:
    body, key = {"flow": "chat", "parameters": PARAMETERS}, {"Idempotency-Key": f"k{time.time_ns()}"}
    first, second = await client.post(body, **key), await client.post(body, **key)
    assert first.json()["id"] == second.json()["id"]
    other = await client.post({**body, "priority": "high"}, **key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")


async def test_a_key_sees_only_its_own_jobs(client: Any, stranger: Any) -> None:
    job = await client.chat("mine")
    path = f"/v1/jobs/{job['id']}"
    answers = [
        await stranger.http.get(path),
        await stranger.http.get(f"{path}/result"),
        await stranger.http.post(f"{path}/cancel"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
    assert (await stranger.http.get("/v1/jobs")).json()["data"] == []
    listed = (await client.http.get("/v1/jobs", params={"limit": 1})).json()["data"]
    assert [entry["id"] for entry in listed] == [job["id"]]


async def test_a_result_is_not_there_before_its_time(client: Any) -> None:
    job = await client.chat(words(400), model="echo-slow")
    answer = await client.http.get(f"/v1/jobs/{job['id']}/result")
    assert answer.status_code == 409
    assert "ask again" in answer.json()["error"]["message"]
    await client.http.post(f"/v1/jobs/{job['id']}/cancel")
    await client.over(job)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"flow": "paint", "parameters": PARAMETERS}, 400, "flow"),
        ({"flow": "chat", "parameters": {**PARAMETERS, "colour": "red"}}, 400, "colour"),
        ({"flow": "chat", "parameters": {**PARAMETERS, "max_tokens": "many"}}, 400, "max_tokens"),
        ({"flow": "chat", "parameters": {"model": "echo"}}, 400, "messages"),
        ({"flow": "chat", "parameters": {**PARAMETERS, "model": "gpt-9"}}, 404, "model"),
        ({"flow": "chat", "parameters": PARAMETERS, "priority": "urgent"}, 400, "priority"),
        ({"flow": "chat", "parameters": PARAMETERS, "when": "now"}, 400, "when"),
        ({"flow": "transcribe", "parameters": {"model": "whisper-1"}}, 400, "file"),
        (
            {"flow": "transcribe", "parameters": {"model": "whisper-1", "file": {"path": "/etc/passwd"}}},
            400,
            "file",
        ),
        (
            {"flow": "converse", "parameters": {"file": {"reference": "jobs/job_1/request.json"}}},
            400,
            "file",
        ),
    ],
)
async def test_a_bad_request_is_refused_by_name(client: Any, body: Any, status: int, param: str) -> None:
    answer = await client.post(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error


@pytest.mark.parametrize(
    ("fields", "upload", "code", "param"),
    [
        ({"flow": "transcribe", "model": "whisper-1"}, b"", "invalid_media", "file"),
        ({"flow": "transcribe", "model": "whisper-1", "x": "1"}, b"RIFF", "unknown_parameter", "x"),
        ({"flow": "chat", "parameters": json.dumps(PARAMETERS)}, b"RIFF", "unknown_parameter", "file"),
        ({"flow": "converse", "parameters": "[1]"}, b"RIFF", "invalid_value", "parameters"),
        (
            {"flow": "converse", "parameters": '{"file": {"path": "/etc/passwd"}}'},
            b"RIFF",
            "invalid_value",
            "file",
        ),
    ],
)
async def test_a_bad_form_is_refused_by_name(
    client: Any, fields: dict[str, str], upload: bytes, code: str, param: str
) -> None:
    answer = await client.http.post("/v1/jobs", data=fields, files={"file": ("a.wav", upload)})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error


async def test_media_that_is_none_fails_its_job_with_the_reason(client: Any) -> None:
    answer = await client.http.post(
        "/v1/jobs",
        data={"flow": "transcribe", "model": "whisper-1"},
        files={"file": ("a.wav", b"this is a text")},
    )
    job = await client.over(answer.json(), timeout_s=90)
    assert (job["status"], job["attempt"], job["error"]["code"]) == ("failed", 1, "invalid_media")
    result = await client.http.get(f"/v1/jobs/{job['id']}/result")
    assert (result.status_code, result.json()["error"]["code"]) == (400, "invalid_media")


@pytest.mark.parametrize("job_id", ["%00", "a%00b", "job_1", "JOB_" + "0" * 24, "job_" + "0" * 24, "%ff"])
async def test_what_is_no_job_is_not_found(client: Any, job_id: str) -> None:
    answers = [
        await client.http.get(f"/v1/jobs/{job_id}"),
        await client.http.get(f"/v1/jobs/{job_id}/result"),
        await client.http.post(f"/v1/jobs/{job_id}/cancel"),
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert [answer.json()["error"]["code"] for answer in answers] == ["not_found"] * 3


@pytest.mark.parametrize("prompt", ['"\\ud800"', "[" * 100_000, "9" * 5000, "NaN"])
async def test_parameters_that_are_no_proper_json(smi: Any, client: Any, prompt: str) -> None:
    before = set((smi.home / "storage" / "jobs").glob("*"))
    fields = {"flow": "transcribe", "parameters": f'{{"model": "whisper-1", "prompt": {prompt}}}'}
    answer = await client.http.post("/v1/jobs", data=fields, files={"file": ("a.wav", b"RIFF")})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("parameters", "prompt")
    assert set((smi.home / "storage" / "jobs").glob("*")) <= before


async def test_an_upload_goes_when_what_comes_after_it_fails(engine: AsyncEngine, tmp_path: Path) -> None:
    job = Submission(new_job_id(), "req_1", key_id=1, flow="chat", model="", priority="normal", digest="")
    for model, error in (("\ud800", PydanticSerializationError), ("echo", IntegrityError)):  # no such key
        asked = StoredRequest(principal=SYSTEM, request_id="req_1", request={"model": model})
        file = {input_reference(job.id, "file"): io.BytesIO(b"RIFF")}
        with pytest.raises(error):
            await _accepted(Storage(str(tmp_path)), Jobs(engine), job, asked, file)
    assert list((tmp_path / "jobs").iterdir()) == []
