"""The table by itself."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncEngine

from blocks.errors import Conflict, NotFound
from blocks.settings import Settings
from blocks.storage import Storage
from deployments.api.keys import Key, new_key
from deployments.jobs.processor import Processor
from deployments.jobs.runs import Runs
from deployments.jobs.store import Job, Jobs, Submission, new_job_id
from deployments.jobs.stored import Failure
from tasks.fleet import Fleet, Node

LOST = Failure(code="run_lost", message="lost", retryable=True)


@pytest.fixture
async def jobs(engine: AsyncEngine) -> Jobs:
    await new_key(engine, "test")
    return Jobs(engine)


def submission(**fields: Any) -> Submission:
    values = {
        "id": new_job_id(),
        "request_id": "req_1",
        "key_id": 1,
        "flow": "chat",
        "model": "echo",
        "priority": "normal",
        "digest": "d",
    }
    return Submission(**{**values, **fields})


async def change(jobs: Jobs, job: Job, **values: Any) -> None:
    async with jobs.engine.begin() as connection:
        await connection.execute(update(Job).where(Job.id == job.id).values(**values))


async def test_higher_priority_goes_first_and_equals_by_age(jobs: Jobs) -> None:
    added = [await jobs.add(submission(priority=p)) for p in ("low", "normal", "high", "normal")]
    waiting = await jobs.waiting(10)
    assert [job.id for job in waiting] == [added[number].id for number in (2, 1, 3, 0)]


async def test_low_priority_does_not_starve(jobs: Jobs) -> None:
    low = await jobs.add(submission(priority="low"))
    await change(jobs, low, turn=Job.turn - timedelta(minutes=21))
    for _ in range(3):
        await jobs.add(submission(priority="high"))
    assert (await jobs.waiting(1))[0].id == low.id


async def test_an_idempotency_key_gives_the_first_job_even_at_once(jobs: Jobs) -> None:
    accepted = await asyncio.gather(*(jobs.add(submission(idempotency_key="k")) for _ in range(8)))
    assert len({job.id for job in accepted}) == 1
    with pytest.raises(Conflict):
        await jobs.add(submission(idempotency_key="k", digest="other"))


async def test_one_attempt_is_claimed_once(jobs: Jobs) -> None:
    job = await jobs.add(submission())
    claims = await asyncio.gather(*(jobs.claim(job, "cpu") for _ in range(8)))
    won = [claim for claim in claims if claim is not None]
    assert [(claim.attempt, claim.state, claim.pool) for claim in won] == [(1, "running", "cpu")]


async def test_a_late_word_on_an_old_attempt_changes_nothing(jobs: Jobs) -> None:
    first = await jobs.claim(await jobs.add(submission()), "cpu")
    assert first is not None
    await jobs.again(first, LOST)
    await change(jobs, first, not_before=func.now())
    second = await jobs.claim((await jobs.waiting(1))[0], "cpu")
    assert second is not None
    assert second.attempt == 2
    await jobs.end(first, "succeeded")
    assert (await jobs.get(first.id, 1)).state == "running"
    await jobs.end(second, "succeeded")
    assert (await jobs.get(first.id, 1)).state == "succeeded"


async def test_an_attempt_that_failed_waits_before_the_next(jobs: Jobs) -> None:
    job = await jobs.claim(await jobs.add(submission()), "cpu")
    assert job is not None
    await jobs.again(job, LOST)
    assert await jobs.waiting(1) == []
    again = await jobs.get(job.id, 1)
    assert (again.state, again.error) == ("accepted", LOST.model_dump())


async def test_a_job_that_waits_is_cancelled_at_once(jobs: Jobs) -> None:
    job = await jobs.add(submission())
    assert (await jobs.cancel(job.id, 1)).state == "cancelled"
    assert await jobs.claim(job, "cpu") is None


async def test_a_cancel_is_not_lost_whatever_happens_beside_it(jobs: Jobs) -> None:
    for _ in range(20):
        job = await jobs.add(submission())
        cancelled, claimed = await asyncio.gather(jobs.cancel(job.id, 1), jobs.claim(job, "cpu"))
        assert cancelled.cancelling
        assert cancelled.state == ("cancelled" if claimed is None else "running")


async def test_a_job_to_be_cancelled_is_not_started_again(jobs: Jobs) -> None:
    for back in (lambda job: jobs.again(job, LOST), jobs.put_back):
        job = await jobs.claim(await jobs.add(submission()), "cpu")
        assert job is not None
        assert (await jobs.cancel(job.id, 1)).state == "running"
        await back(job)
        seen = await jobs.get(job.id, 1)
        assert (seen.state, seen.ended is not None) == ("cancelled", True)


async def test_a_job_to_be_cancelled_is_not_claimed(jobs: Jobs) -> None:
    job = await jobs.add(submission())
    await change(jobs, job, cancelling=True)
    assert await jobs.claim(job, "cpu") is None


async def test_an_attempt_that_could_not_begin_does_not_count(jobs: Jobs) -> None:
    job = await jobs.claim(await jobs.add(submission()), "cpu")
    assert job is not None
    await jobs.put_back(job)
    seen = await jobs.get(job.id, 1)
    assert (seen.state, seen.attempt, await jobs.waiting(1)) == ("accepted", 0, [])


async def test_a_job_is_its_keys_own(jobs: Jobs, engine: AsyncEngine) -> None:
    await new_key(engine, "other")
    job = await jobs.add(submission())
    for act in (jobs.get, jobs.cancel):
        with pytest.raises(NotFound):
            await act(job.id, 2)
    assert await jobs.list(2, 10) == []
    assert (await jobs.get(job.id, 1)).state == "accepted"
    assert Key.__tablename__ == "keys"


async def test_jobs_wait_accepted_while_prefect_is_away(jobs: Jobs, settings: Settings) -> None:
    job = await jobs.add(submission())
    fleet = Fleet(settings)
    fleet.nodes["n:1"] = Node("n:1", "cpu", 2**32, 2**32)
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as away:
        processor = Processor(jobs.engine, Runs(away), fleet, Storage("memory://jobs"))
        with pytest.raises(httpx.ConnectError):
            await processor.turn()
    await fleet.client.close()
    seen = await jobs.get(job.id, 1)
    assert (seen.state, seen.attempt) == ("accepted", 0)
