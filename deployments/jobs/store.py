"""The jobs table. A job is accepted once its request is stored and its row is committed.

States: accepted (waits) -> running (a flow run was asked for) -> succeeded, failed or cancelled; a failed
attempt that is worth another goes back to accepted. Each change names the state and attempt that it
starts from, so that processors on several machines can do no harm to one another.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    DateTime,
    ForeignKey,
    Index,
    String,
    UniqueConstraint,
    Update,
    bindparam,
    case,
    func,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import Mapped, mapped_column

from blocks.errors import Conflict, NotFound
from deployments.api.keys import Key
from deployments.database import Base
from deployments.jobs.stored import Failure
from tasks.job import Priority

JobState = Literal["accepted", "running", "succeeded", "failed", "cancelled"]
OPEN: tuple[JobState, ...] = ("accepted", "running")
MAX_ATTEMPTS = 3
BACKOFF_S = 1.0  # before the second attempt; doubles
PUT_BACK = timedelta(seconds=5)  # before a job that Prefect would not take is offered again
CHANNEL = "smi_jobs"  # notified when there is something to do

# Aging: a job waits its turn as if it had come so much later. A low job that is older than a high one by
# more than the difference goes first, so none waits for ever.
HANDICAP: dict[Priority, timedelta] = {
    "high": timedelta(0),
    "normal": timedelta(minutes=5),
    "low": timedelta(minutes=20),
}


class Job(Base):
    """A row of table `jobs`."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("key_id", "idempotency_key"),
        Index("jobs_open", "state", "turn", postgresql_where=text("state IN ('accepted', 'running')")),
        Index("jobs_of_key", "key_id", "created"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    request_id: Mapped[str]
    key_id: Mapped[int] = mapped_column(ForeignKey(Key.id))
    flow: Mapped[str]
    model: Mapped[str]
    priority: Mapped[Priority] = mapped_column(String)
    idempotency_key: Mapped[str | None]
    digest: Mapped[str]
    state: Mapped[str] = mapped_column(default="accepted")
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int] = mapped_column(default=MAX_ATTEMPTS)
    flow_run_id: Mapped[str | None]
    pool: Mapped[str | None]
    cancelling: Mapped[bool] = mapped_column(default=False)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    turn: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    not_before: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    started: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    ended: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class Kind(NamedTuple):
    """What decides where a job can run."""

    flow: str
    model: str
    priority: Priority


KIND = (Job.flow, Job.model, Job.priority)


@dataclass(frozen=True, slots=True)
class Submission:
    """A job as it is handed in; its request is stored already."""

    id: str
    request_id: str
    key_id: int
    flow: str
    model: str
    priority: Priority
    digest: str
    idempotency_key: str | None = None


def new_job_id() -> str:
    return f"job_{secrets.token_hex(12)}"


class Jobs:
    """The table's operations; each is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._session = async_sessionmaker(engine, expire_on_commit=False)

    async def add(self, job: Submission) -> Job:
        """Accept a job; with an idempotency key that was used before, the job of then.

        Raises:
            Conflict: it was used for another request.
        """
        values = {name: getattr(job, name) for name in job.__slots__}
        times = {"created": func.now(), "turn": func.now() + bindparam("handicap", HANDICAP[job.priority])}
        async with self._session() as session, session.begin():
            added = await session.scalar(
                insert(Job)
                .values(state="accepted", attempt=0, max_attempts=MAX_ATTEMPTS, cancelling=False)
                .values(**values, **times)
                .on_conflict_do_nothing(index_elements=["key_id", "idempotency_key"])
                .returning(Job)
            )
            if added is not None:
                await session.execute(select(func.pg_notify(CHANNEL, "")))
        return added or await self._repeated(job)

    async def _repeated(self, job: Submission) -> Job:
        async with self._session() as session:
            first = await session.scalar(
                select(Job).filter_by(key_id=job.key_id, idempotency_key=job.idempotency_key)
            )
        if first is None or first.digest != job.digest:
            raise Conflict(
                "this Idempotency-Key was used for another request; use a new key", param="Idempotency-Key"
            )
        return first

    async def get(self, job_id: str, key_id: int) -> Job:
        """A job of that key. Raises `NotFound` for another key's as for none."""
        async with self._session() as session:
            job = await session.scalar(select(Job).filter_by(id=job_id, key_id=key_id))
        if job is None:
            raise NotFound(f"job {job_id!r} does not exist")
        return job

    async def signed_for(self, job_id: str) -> Job:
        """A job, for whoever has a link that we signed."""
        async with self._session() as session:
            job = await session.scalar(select(Job).filter_by(id=job_id))
        if job is None:
            raise NotFound(f"job {job_id!r} does not exist")
        return job

    async def owner(self, job: Job) -> str:
        """The name of the job's key."""
        async with self._session() as session:
            return await session.scalar(select(Key.name).where(Key.id == job.key_id)) or ""

    async def list(self, key_id: int, limit: int) -> Sequence[Job]:
        """The jobs of a key, newest first."""
        async with self._session() as session:
            query = select(Job).filter_by(key_id=key_id).order_by(Job.created.desc(), Job.id).limit(limit)
            return (await session.scalars(query)).all()

    async def cancel(self, job_id: str, key_id: int) -> Job:
        """Cancel a job: at once if it waits, else soon. One that is over stays as it is.

        Raises:
            NotFound: the key has no such job.
        """
        waits = Job.state == "accepted"
        await self._change(
            update(Job)
            .where(Job.id == job_id, Job.key_id == key_id, Job.state.in_(OPEN))
            .values(
                cancelling=True,
                state=case((waits, "cancelled"), else_=Job.state),
                ended=case((waits, func.now()), else_=Job.ended),
            )
        )
        return await self.get(job_id, key_id)

    async def kinds_waiting(self) -> Sequence[Kind]:
        """Each kind of which an accepted job's time has come."""
        async with self._session() as session:
            found = await session.execute(select(*KIND).where(*_due()).distinct())
            return [Kind(*row) for row in found]

    async def waiting(self, limit: int, kinds: Collection[Kind] | None = None) -> Sequence[Job]:
        """Accepted jobs whose time has come, best first; only those of `kinds`, if given."""
        query = select(Job).where(*_due()).order_by(Job.turn, Job.id).limit(limit)
        if kinds is not None:
            query = query.where(tuple_(*KIND).in_(kinds))
        async with self._session() as session:
            return (await session.scalars(query)).all()

    async def running(self) -> Sequence[Job]:
        async with self._session() as session:
            return (await session.scalars(select(Job).where(Job.state == "running"))).all()

    async def claim(self, job: Job, pool: str) -> Job | None:
        """Begin the next attempt, unless another processor has begun it or the job was cancelled."""
        free = select(Job.id).where(
            Job.id == job.id, Job.state == "accepted", ~Job.cancelling, Job.attempt == job.attempt
        )
        async with self._session() as session, session.begin():
            return cast(
                Job | None,
                await session.scalar(
                    update(Job)
                    .where(Job.id.in_(free.with_for_update(skip_locked=True)))
                    .values(
                        state="running",
                        attempt=Job.attempt + 1,
                        pool=pool,
                        flow_run_id=None,
                        started=func.coalesce(Job.started, func.now()),
                    )
                    .returning(Job)
                ),
            )

    async def started(self, job: Job, flow_run_id: str) -> bool:
        """Whether the attempt is still on."""
        return await self._change(_this(job).values(flow_run_id=flow_run_id)) > 0

    async def end(self, job: Job, state: JobState, error: Failure | None = None) -> None:
        """The attempt decided the job. No effect if another processor has said so already."""
        told = error.model_dump() if error else None
        await self._change(_this(job).values(state=state, error=told, ended=func.now()))

    async def again(self, job: Job, error: Failure) -> None:
        """The attempt failed, and the job waits for another, unless it is to be cancelled."""
        pause = timedelta(seconds=BACKOFF_S * 2 ** (job.attempt - 1))
        await self._change(_this(job).values(error=error.model_dump(), **_back(pause)))

    async def put_back(self, job: Job) -> None:
        """The attempt could not begin, and does not count."""
        await self._change(_this(job).values(attempt=Job.attempt - 1, **_back(PUT_BACK)))

    async def _change(self, statement: Update) -> int:
        async with self._session() as session, session.begin():
            changed = cast(CursorResult[Any], await session.execute(statement)).rowcount
            if changed:
                await session.execute(select(func.pg_notify(CHANNEL, "")))
        return changed


def _due() -> tuple[ColumnElement[bool], ...]:
    return Job.state == "accepted", Job.not_before.is_(None) | (Job.not_before <= func.now())


def _back(pause: timedelta) -> dict[str, Any]:
    """What puts a running job back in the queue; one that is to be cancelled is not started again."""
    return {
        "state": case((Job.cancelling, "cancelled"), else_="accepted"),
        "ended": case((Job.cancelling, func.now())),
        "not_before": func.now() + bindparam("pause", pause),
    }


def _this(job: Job) -> Update:
    return update(Job).where(Job.id == job.id, Job.state == "running", Job.attempt == job.attempt)
