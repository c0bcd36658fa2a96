"""Prefect forgets events that it accepted when its queue is full or it dies; steps arrive all the same."""

import asyncio
import time

import httpx

from blocks.settings import Settings
from deployments.recorder import prefect_steps
from deployments.recorder.calls import Calls
from deployments.recorder.lines import Record
from deployments.recorder.prefect_runs import PrefectRuns
from tasks.live import StepRecord


class Forgetful(httpx.AsyncHTTPTransport):
    """Accepts the first posts of events as Prefect does, and loses them."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events") and self.times:
            self.times -= 1
            return httpx.Response(204)
        return await super().handle_async_request(request)


def ended(flow: str, number: int) -> Record:
    now = time.time()
    steps = [StepRecord("generate", now - 1, now), StepRecord("dispatch", now - 1, now)]
    return Record(number, flow, f"req_{number}", "first", now - 1, now, "COMPLETED", steps=steps)


async def test_steps_that_prefect_forgot_are_posted_again(
    prefect, prefect_settings: Settings, monkeypatch
) -> None:
    monkeypatch.setattr(prefect_steps, "REPOST_S", 0.3)
    monkeypatch.setattr(prefect_steps, "WINDOW", 4)
    user, _, password = prefect_settings.require("prefect_auth").partition(":")
    async with httpx.AsyncClient(
        base_url=prefect_settings.require("prefect_url"),
        auth=(user, password),
        transport=Forgetful(1),
        timeout=30,
    ) as http:
        runs = PrefectRuns(Calls(http), prefect.flow)
        await runs.write([ended(prefect.flow, 1), ended(prefect.flow, 2)], [], doubt=False)
        assert runs.steps.full
        async with asyncio.timeout(30):
            while runs.steps.full:
                await runs.steps.confirm()
                await asyncio.sleep(0.1)
    for run in await prefect.runs():
        assert sorted(step["name"] for step in await prefect.steps(run)) == ["dispatch", "generate"]


async def test_steps_of_a_run_that_was_deleted_are_not_waited_for(prefect, monkeypatch) -> None:
    monkeypatch.setattr(prefect_steps, "REPOST_S", 0.1)
    monkeypatch.setattr(prefect_steps, "WINDOW", 1)
    record = ended(prefect.flow, 1)
    runs = PrefectRuns(Calls(prefect.http), prefect.flow)
    await runs.write([], [record], doubt=False)
    (run,) = await prefect.runs()
    await prefect.http.delete(f"/flow_runs/{run['id']}")
    steps = runs.steps
    steps._posted.append(
        prefect_steps.Posted(
            {key: (run["id"], event) for key, event in prefect_steps.events(prefect.flow, record)}
        )
    )
    assert steps.full
    async with asyncio.timeout(10):
        while steps.full:
            await steps.confirm()
            await asyncio.sleep(0.1)
