"""The processor's turn, on a database of its own and the installation's Prefect."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from blocks.settings import Settings, load_settings
from blocks.storage import Storage
from deployments.api.keys import new_key
from deployments.jobs.processor import CANDIDATES, Processor
from deployments.jobs.runs import Runs
from deployments.jobs.store import Job, Submission, new_job_id
from deployments.jobs.stored import Failure, Stored
from tasks.fleet import Fleet, Node

SINGLE = "echo-single"
POOL = "jobs-test"  # no worker serves it


@pytest.fixture
async def processor(
    engine: AsyncEngine, settings: Settings, prefect: httpx.AsyncClient
) -> AsyncIterator[Processor]:
    await new_key(engine, "test")
    await prefect.post("/work_pools/", json={"name": POOL, "type": "smi"})
    for queue in ("high", "normal"):
        await prefect.post(f"/work_pools/{POOL}/queues", json={"name": queue})
    fleet = Fleet(settings)
    fleet.nodes["n:1"] = Node("n:1", POOL, 2**30, 2**30)
    yield Processor(engine, Runs(prefect), fleet, Storage("memory://processor"))
    await fleet.client.close()
    await prefect.delete(f"/work_pools/{POOL}")


async def add(processor: Processor, **fields: Any) -> Job:
    values = {
        "id": new_job_id(),
        "request_id": "req_1",
        "key_id": 1,
        "flow": "chat",
        "model": "echo",
        "priority": "normal",
        "digest": "d",
    }
    return await processor.jobs.add(Submission(**{**values, **fields}))


async def claimed(processor: Processor) -> Job:
    job = await processor.jobs.claim(await add(processor), POOL)
    assert job is not None
    return job


async def state(processor: Processor, job: Job) -> tuple[str, int]:
    seen = await processor.jobs.get(job.id, 1)
    return seen.state, seen.attempt


async def test_a_job_that_cannot_be_started_holds_up_no_other(
    processor: Processor, prefect: httpx.AsyncClient
) -> None:
    (await prefect.delete(f"/work_pools/{POOL}/queues/high")).raise_for_status()
    bad, good = await add(processor, priority="high"), await add(processor)
    assert await processor.turn()
    assert await state(processor, bad) == ("accepted", 0)
    assert await state(processor, good) == ("running", 1)
    assert (await processor.jobs.get(good.id, 1)).flow_run_id


async def test_runs_in_a_pool_that_was_deleted_are_given_up(
    processor: Processor, prefect: httpx.AsyncClient
) -> None:
    assert await Runs(prefect).silences("no-such-pool") == {}


async def test_a_job_to_be_cancelled_that_has_no_run_is_not_started(
    processor: Processor, prefect: httpx.AsyncClient
) -> None:
    job = await claimed(processor)
    await processor.jobs.cancel(job.id, 1)
    await processor.turn()
    assert await state(processor, job) == ("cancelled", 1)
    assert await processor.runs.of(job) is None


async def test_a_job_to_be_cancelled_whose_run_was_not_noted_is_cancelled_there_too(
    processor: Processor, prefect: httpx.AsyncClient
) -> None:
    job = await claimed(processor)
    run_id = await processor.runs.start(job, "test")  # and the processor is killed
    await processor.jobs.cancel(job.id, 1)
    await processor.turn()
    await processor.turn()
    assert await state(processor, job) == ("cancelled", 1)
    assert (await prefect.get(f"/flow_runs/{run_id}")).json()["state_type"] == "CANCELLED"


async def test_a_run_that_was_started_too_late_is_cancelled(
    processor: Processor, prefect: httpx.AsyncClient
) -> None:
    job = await claimed(processor)
    await processor.jobs.end(job, "cancelled")
    await processor._start(job)
    assert (await prefect.get(f"/flow_runs/{job.flow_run_id}")).json()["state_type"] == "CANCELLED"


async def test_jobs_that_no_node_can_take_do_not_starve_the_others(processor: Processor) -> None:
    room = int(processor.fleet.catalogue.get("echo").memory)
    processor.fleet.nodes["n:1"] = Node("n:1", POOL, room, room)
    for _ in range(CANDIDATES):
        await add(processor, flow="transcribe", model="whisper-1", priority="high")
    small = await add(processor)
    await processor.turn()
    assert await state(processor, small) == ("running", 1)


async def test_a_database_that_breaks_off_does_not_fail_a_job(
    processor: Processor, engine: AsyncEngine
) -> None:
    job = await claimed(processor)
    stored = Stored.of(job.id, job.attempt)
    processor.storage.write(stored.result, b"{}")
    end = processor.jobs.end
    errors: list[DBAPIError] = []

    async def broken(*_: Any, **__: Any) -> None:
        async with engine.connect() as connection:  # a real error of the kind that a restart gives
            try:
                await connection.exec_driver_sql(
                    "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '57P01'; END $$"
                )
            except DBAPIError as error:
                errors.append(error)
                raise

    processor.jobs.end = broken  # type: ignore[method-assign]
    with pytest.raises(DBAPIError):
        await processor._decide(job, "COMPLETED", "Completed")
    assert type(errors[0]) is DBAPIError
    processor.jobs.end = end  # type: ignore[method-assign]
    assert await state(processor, job) == ("running", 1)
    await processor._decide(job, "COMPLETED", "Completed")
    assert await state(processor, job) == ("succeeded", 1)


@pytest.mark.parametrize("error", [b"no JSON", b'{"code": "x", "message": "a\\u0000b"}'])
async def test_what_a_job_left_fails_that_job_alone(processor: Processor, error: bytes) -> None:
    job = await claimed(processor)
    processor.storage.write(Stored.of(job.id, job.attempt).error, error)
    await processor._decide(job, "FAILED", "Failed")
    seen = await processor.jobs.get(job.id, 1)
    assert seen.state == "failed"
    assert Failure.model_validate(seen.error).code == "internal_error"


async def test_a_jobs_priority_holds_in_its_nodes_queue(smi: Any, client: Any) -> None:
    """The model has one slot; the first job holds it until the two others wait at the node."""
    fleet = Fleet(load_settings(home=smi.home))
    await fleet.start()

    async def until(active: int, queued: int) -> None:
        async with asyncio.timeout(30):
            seen: list[tuple[int, int]] = []
            while (active, queued) not in seen:
                await asyncio.sleep(0.05)
                runners = [node.runners.get(SINGLE) for node in fleet.nodes.values()]
                seen = [(runner.active, runner.queued) for runner in runners if runner]

    first = await client.until(await client.chat(" ".join("w" * 1000), model=SINGLE), "running")
    await until(1, 0)
    jobs = []
    for count, priority in enumerate(("low", "high"), start=1):
        jobs.append(await client.chat(" ".join("w" * 10), model=SINGLE, priority=priority))
        await until(1, count)
    await fleet.stop()
    await client.http.post(f"/v1/jobs/{first['id']}/cancel")
    low, high = [await client.over(job) for job in jobs]
    assert (low["status"], high["status"]) == ("succeeded", "succeeded")
    assert high["ended_at"] < low["ended_at"]
