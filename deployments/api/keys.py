"""API keys: made at random, shown once, kept as SHA-256.

A key has 256 random bits, so one round of SHA-256 is enough and its look-up in a table leaks nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from dataclasses import dataclass
from datetime import datetime

import asyncpg
from sqlalchemy import DateTime, LargeBinary, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from blocks.errors import Unauthenticated, Unavailable
from deployments.database import Base, create_tables
from tasks.principal import Principal

PREFIX = "sk-smi-"
REFRESH_S = 3.0  # how long a revoked key may still be good
MISS_S = 0.25  # unknown keys cost the database one query in so long, however many come
_FIRST_KEY_LOCK = 0x534D4B

log = logging.getLogger("smi.keys")


class Key(Base):
    """A row of table `keys`."""

    __tablename__ = "keys"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    sha256: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    created: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    revoked: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """Who calls."""

    id: int
    name: str

    @property
    def principal(self) -> Principal:
        """Until keys have policies of their own, a key may do what this installation can."""
        return Principal(self.name, self.id, "any")


def _made(name: str) -> tuple[str, Key]:
    key = PREFIX + secrets.token_urlsafe(32)
    return key, Key(name=name, sha256=hashlib.sha256(key.encode()).digest())


async def new_key(engine: AsyncEngine, name: str) -> str:
    """Make a key and return it; it cannot be shown again."""
    key, row = _made(name)
    async with AsyncSession(engine) as session, session.begin():
        session.add(row)
    return key


async def first_key(engine: AsyncEngine, name: str = "first") -> str | None:
    """A new key if there is none at all, else None. Two processes that start at once make one key."""
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _FIRST_KEY_LOCK})
        if await session.scalar(select(func.count()).select_from(Key)):
            return None
        key, row = _made(name)
        session.add(row)
    return key


class Keys:
    """The keys that are good now, in memory: a request with a known key makes no database call.

    An unknown key waits for the next read of the table, which all unknown keys share, so that a flood
    of wrong ones floods neither the database nor memory. While the database is away known keys stay good.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[bytes, KeyInfo] = {}
        self._prepared = False
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self.reachable = False

    async def start(self) -> None:
        await self._read()
        self._task = asyncio.create_task(self._keep_reading())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def owner(self, key: str) -> KeyInfo:
        """Whose key it is.

        Raises:
            Unauthenticated: it is nobody's, or was revoked.
            Unavailable: it is not known here, and the database cannot be asked.
        """
        digest = hashlib.sha256(key.encode()).digest()
        known = self._known.get(digest)
        if known is None and key.startswith(PREFIX):
            if not await self._after_next_read():
                raise Unavailable("this key cannot be checked now: the database is away", retry_after=5)
            known = self._known.get(digest)
        if known is None:
            raise Unauthenticated(
                "this API key is not known here, or was revoked; `smi up --new-key` makes one"
            )
        return known

    async def _after_next_read(self) -> bool:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        self._wanted.set()
        return await asyncio.shield(self._next)

    async def _keep_reading(self) -> None:
        while True:
            await asyncio.sleep(MISS_S)
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            waiting, self._next = self._next, None
            self._wanted.clear()
            read = await self._read()
            if waiting is not None:
                waiting.set_result(read)

    async def _read(self) -> bool:
        try:
            if not self._prepared:
                await create_tables(self._engine)
                self._prepared = True
            async with AsyncSession(self._engine) as session:
                rows = await session.execute(
                    select(Key.sha256, Key.id, Key.name).where(Key.revoked.is_(None))
                )
                self._known = {digest: KeyInfo(id, name) for digest, id, name in rows}
        except (
            SQLAlchemyError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            OSError,
            TimeoutError,
        ) as error:
            if self.reachable or not self._prepared:
                log.warning("the database cannot be read (%s); known keys stay good", type(error).__name__)
            self.reachable = False
        else:
            self.reachable = True
        return self.reachable
