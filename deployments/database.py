"""The PostgreSQL tables that SMI owns. Each table's module declares its model on `Base`."""

from __future__ import annotations

import importlib

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from blocks.settings import Settings

TABLES = ("deployments.api.keys", "deployments.jobs.store")  # the modules that declare tables
UNFIT = ("22", "23")  # SQLSTATE classes: data exception, integrity constraint violation
_SCHEMA_LOCK = 0x534D49  # "SMI"; any fixed number does


class Base(DeclarativeBase):
    """Common base of SMI's tables."""


def engine_for(settings: Settings) -> AsyncEngine:
    """The engine of this process. Connects lazily; a connection that died is replaced when taken.

    Raises:
        ConfigurationError: if there is no `database_url`.
    """
    return create_async_engine(
        settings.require("database_url"),
        pool_pre_ping=True,
        pool_timeout=5,
        connect_args={"timeout": 5, "command_timeout": 30},
    )


async def create_tables(engine: AsyncEngine) -> None:
    """Create the tables that are missing, one process at a time."""
    for module in TABLES:
        importlib.import_module(module)
    async with engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
        await connection.run_sync(Base.metadata.create_all)


def away(error: BaseException) -> bool:
    """Whether the database does not answer, or broke off; a wrong statement is our bug and no such case."""
    if isinstance(error, DBAPIError):
        return _state_class(error) not in (*UNFIT, "42")
    return isinstance(error, ConnectionError | PoolTimeout)


def unfit(error: BaseException) -> bool:
    """Whether the data are at fault; SQLAlchemy's classes do not tell that from a database that is away."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, ValueError)
    return _state_class(error) in UNFIT


def _state_class(error: DBAPIError) -> str:
    return (getattr(error.orig, "sqlstate", None) or "")[:2]
