from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import event, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from blocks.errors import Unauthenticated, Unavailable
from blocks.settings import load_settings
from deployments.api import keys as module
from deployments.api.keys import PREFIX, Key, Keys, first_key, new_key
from deployments.database import create_tables


class Wire:
    """Carries connections to a PostgreSQL socket until it is cut."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.socket = target, folder / target.name
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._carry, self.socket)

    async def cut(self) -> None:
        self.server.close()
        self.socket.unlink(missing_ok=True)
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0.05)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self.target)
        self.writers += [writer, back]
        await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def wire(smi: Any, tmp_path: Path) -> AsyncIterator[tuple[Wire, AsyncEngine]]:
    """An own database on the installation's PostgreSQL, over a connection that can be cut."""
    url = load_settings(home=smi.home).require("database_url")
    admin = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with admin.connect() as connection:
        await connection.execute(text("DROP DATABASE IF EXISTS keys_test WITH (FORCE)"))
        await connection.execute(text("CREATE DATABASE keys_test"))
    await admin.dispose()
    host = parse_qs(urlsplit(url).query)["host"][0]
    carrier = Wire(next(Path(host).glob(".s.PGSQL.*[0-9]")), tmp_path)
    await carrier.start()
    port = carrier.socket.suffix.removeprefix(".")
    engine = create_async_engine(f"postgresql+asyncpg://postgres@/keys_test?host={tmp_path}&port={port}")
    await create_tables(engine)
    yield carrier, engine
    await engine.dispose()
    await carrier.cut()


@pytest.fixture
async def keys(wire: tuple[Wire, AsyncEngine]) -> AsyncIterator[Keys]:
    held = Keys(wire[1])
    await held.start()
    yield held
    await held.stop()


async def test_the_first_key_is_made_once_and_kept_hashed(wire: tuple[Wire, AsyncEngine]) -> None:
    _, engine = wire
    made = await asyncio.gather(*(first_key(engine) for _ in range(5)))
    shown = [key for key in made if key]
    assert len(shown) == 1
    assert shown[0].startswith(PREFIX)
    assert len(shown[0]) == len(PREFIX) + 43  # 256 bits
    async with engine.connect() as connection:
        rows = str((await connection.execute(text("SELECT * FROM keys"))).all())
    assert shown[0].removeprefix(PREFIX) not in rows


async def test_a_new_key_is_good_at_once_and_a_revoked_one_not_for_long(
    wire: tuple[Wire, AsyncEngine], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.2)
    key = await new_key(wire[1], "mine")
    assert (await keys.owner(key)).name == "mine"
    async with wire[1].begin() as connection:
        await connection.execute(update(Key).values(revoked=text("now()")))
    async with asyncio.timeout(module.MISS_S + 4):  # the wait that goes on was begun with the old value
        while True:
            try:
                await keys.owner(key)
            except Unauthenticated:
                break
            await asyncio.sleep(0.05)


async def test_a_flood_of_wrong_keys_floods_neither_the_database_nor_memory(
    wire: tuple[Wire, AsyncEngine], keys: Keys
) -> None:
    key = await new_key(wire[1], "mine")
    await keys.owner(key)
    queries = 0

    @event.listens_for(wire[1].sync_engine, "before_cursor_execute")
    def count(*_: Any) -> None:
        nonlocal queries
        queries += 1

    started = time.monotonic()
    wrong = [keys.owner(f"{PREFIX}{number:043}") for number in range(5000)]
    assert all(isinstance(r, Unauthenticated) for r in await asyncio.gather(*wrong, return_exceptions=True))
    assert queries <= 2
    assert time.monotonic() - started < 3
    assert len(keys._known) == 1
    queries = 0
    for _ in range(1000):
        await keys.owner(key)
    assert queries == 0


async def test_known_keys_outlive_the_database(wire: tuple[Wire, AsyncEngine], keys: Keys) -> None:
    carrier, engine = wire
    key, later = await new_key(engine, "known"), await new_key(engine, "later")
    await keys.owner(key)
    unknown = PREFIX + "y" * 43
    await carrier.cut()
    with pytest.raises(Unavailable):
        await keys.owner(unknown)
    assert not keys.reachable
    assert (await keys.owner(key)).name == "known"
    await carrier.start()
    with pytest.raises(Unauthenticated):
        await keys.owner(unknown)
    assert keys.reachable
    assert (await keys.owner(later)).name == "later"
