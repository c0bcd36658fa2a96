"""A job's progress and the files that it makes, by key and by signed link."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from blocks.settings import Settings
from blocks.storage import Storage
from deployments.jobs.stored import Stored
from tasks.links import link


def picture(width: int = 12, height: int = 8) -> bytes:
    made = io.BytesIO()
    Image.new("RGBA", (width, height), (200, 30, 30, 255)).save(made, "PNG")
    return made.getvalue()


async def upscaled(client: Any) -> dict[str, Any]:
    fields = {"flow": "upscale", "scale": "2"}
    answer = await client.http.post("/v1/jobs", data=fields, files={"file": ("red.png", picture())})
    assert answer.status_code == 202, answer.text
    job = await client.over(answer.json(), timeout_s=120)
    assert job["status"] == "succeeded", job
    return dict(job)


_made: dict[str, Any] = {}


@pytest.fixture
async def made(client: Any) -> dict[str, Any]:
    """A job that has made one picture; the same for all tests."""
    if not _made:
        _made.update(await upscaled(client))
    return _made


async def test_progress_is_told_while_a_job_runs_and_after(client: Any) -> None:
    job = await client.chat(" ".join(f"w{number}" for number in range(40)), model="echo-slow")
    async with asyncio.timeout(30):
        while not (steps := (seen := await client.get(job))["steps"]):
            await asyncio.sleep(0.05)
    assert (seen["status"], steps[0]["name"], steps[0]["status"]) == ("running", "generate", "running")
    assert steps[0]["ended_at"] is None
    assert time.time() - steps[0]["started_at"] < 10
    (step,) = (await client.over(job))["steps"]
    assert (step["status"], step["progress"], step["model"], step["error"]) == (
        "succeeded",
        1.0,
        "echo-slow",
        None,
    )
    assert step["ended_at"] - step["started_at"] > 1.5


async def test_a_step_that_failed_says_why(client: Any) -> None:
    job = await client.over(await client.chat("crash", model="echo-crash"))
    (step,) = job["steps"]
    assert (step["status"], step["error"]["code"], step["error"]["param"]) == ("failed", "runner_died", None)
    assert step["progress"] < 1


async def test_a_cancelled_jobs_steps_are_cancelled(client: Any) -> None:
    job = await client.chat("w " * 2000, model="echo-slow")
    async with asyncio.timeout(30):
        while not (await client.get(job))["steps"]:
            await asyncio.sleep(0.05)
    await client.http.post(f"/v1/jobs/{job['id']}/cancel")
    assert [step["status"] for step in (await client.over(job))["steps"]] == ["cancelled"]


async def test_a_file_is_listed_and_comes_with_its_type(client: Any, made: dict[str, Any]) -> None:
    (file,) = made["files"]
    assert (file["name"], file["content_type"]) == ("enlarge/upscaled.png", "image/png")
    answer = await client.http.get(f"/v1/jobs/{made['id']}/files/{file['name']}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["content-disposition"] == "inline; filename*=UTF-8''upscaled.png"
    assert len(answer.content) == file["bytes"] == int(answer.headers["content-length"])
    assert Image.open(io.BytesIO(answer.content)).size == (24, 16)


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-9", 0, 9), ("bytes=10-", 10, -1), ("bytes=-7", -7, -1), ("bytes=0-999999999", 0, -1)],
)
async def test_a_range_of_it(client: Any, made: dict[str, Any], asked: str, first: int, last: int) -> None:
    path = f"/v1/jobs/{made['id']}/files/{made['files'][0]['name']}"
    whole = (await client.http.get(path)).content
    size = len(whole)
    first, last = first % size, last % size
    answer = await client.http.get(path, headers={"Range": asked})
    assert answer.content == whole[first : last + 1]
    if len(answer.content) < size:
        assert (answer.status_code, answer.headers["content-range"]) == (206, f"bytes {first}-{last}/{size}")


@pytest.mark.parametrize("asked", ["bytes=5-3", f"bytes={'9' * 5000}-", "bytes=-", "bytes=٣-", "lines=0-9"])
async def test_what_is_no_range_is_passed_over(client: Any, made: dict[str, Any], asked: str) -> None:
    path = f"/v1/jobs/{made['id']}/files/{made['files'][0]['name']}"
    answer = await client.http.get(path, headers={"Range": asked.encode()})
    assert (answer.status_code, len(answer.content)) == (200, made["files"][0]["bytes"])


async def test_a_range_that_is_not_there(client: Any, made: dict[str, Any]) -> None:
    path = f"/v1/jobs/{made['id']}/files/{made['files'][0]['name']}"
    answer = await client.http.get(path, headers={"Range": "bytes=99999999-"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range_not_satisfiable")


@pytest.mark.parametrize("name", ["nothing.png", "../request.json", "%2e%2e/request.json", "enlarge", "%00"])
async def test_no_other_file_is_given(client: Any, made: dict[str, Any], name: str) -> None:
    answer = await client.http.get(f"/v1/jobs/{made['id']}/files/{name}")
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["code"] == "not_found"


async def test_a_file_is_its_keys_alone(stranger: Any, smi: Any, made: dict[str, Any]) -> None:
    path = f"/v1/jobs/{made['id']}/files/{made['files'][0]['name']}"
    assert (await stranger.http.get(path)).status_code == 404
    async with httpx.AsyncClient(base_url=smi.url, trust_env=False) as nobody:
        assert (await nobody.get(path)).status_code == 401


async def test_its_link_opens_without_a_key(made: dict[str, Any]) -> None:
    async with httpx.AsyncClient(trust_env=False) as browser:
        answer = await browser.get(made["files"][0]["url"])
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_a_link_that_was_changed_is_refused_in_words(settings: Settings, made: dict[str, Any]) -> None:
    url = made["files"][0]["url"]
    old = settings.model_copy(update={"link_days": -1.0})
    links = {
        url[:-1] + ("0" if url[-1] != "0" else "1"): "not ours",
        url.replace("upscaled", "other"): "not ours",
        url.partition("&signature=")[0] + "&signature=": "not ours",
        url.partition("?")[0] + "?signature=" + "0" * 64: "as it was given",
        link(old, urlsplit(url).path): "expired",
    }
    async with httpx.AsyncClient(trust_env=False) as browser:
        for changed, told in links.items():
            answer = await browser.get(changed)
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (403, True), answer.text
        assert (await browser.post(url)).status_code == 403
        other = url.replace(urlsplit(url).path, f"/v1/jobs/{made['id']}")
        assert (await browser.get(other)).status_code == 401


async def test_a_result_that_another_machine_has_is_asked_for_in_words(
    client: Any, settings: Settings
) -> None:
    job = await client.over(await client.chat("hello"))
    Storage(settings.storage).remove(Stored.of(job["id"], 1).result)
    answer = await client.http.get(f"/v1/jobs/{job['id']}/result")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "storage_not_shared")
    assert "machines need shared storage. Set SMI_STORAGE_URL" in answer.json()["error"]["message"]
