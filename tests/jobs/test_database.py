"""Which of the database's errors are whose fault, on a real PostgreSQL."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from deployments.database import away, unfit


@pytest.mark.parametrize(
    ("statement", "is_away", "is_unfit"),
    [
        ("select 1 / 0", False, True),
        ("select * from nowhere", False, False),
        ("select pg_terminate_backend(pg_backend_pid())", True, False),
    ],
)
async def test_bad_data_a_bug_and_an_outage_are_told_apart(
    engine: AsyncEngine, statement: str, is_away: bool, is_unfit: bool
) -> None:
    with pytest.raises(DBAPIError) as caught:
        async with engine.connect() as connection:
            await connection.execute(text(statement))
    assert (away(caught.value), unfit(caught.value)) == (is_away, is_unfit)


def test_errors_that_are_not_the_databases() -> None:
    assert away(ConnectionRefusedError())
    assert not away(ValueError())
    assert not away(KeyError())
