"""The jobs of a whole installation, as a client, as Prefect and as the database see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from blocks.settings import Settings, load_settings
from deployments.api.keys import new_key
from deployments.database import create_tables
from deployments.jobs.store import OPEN
from tasks.prefect_api import prefect_http


class Client:
    """/v1/jobs with one key."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post("/v1/jobs", json=body, headers=headers)

    async def chat(self, content: str, model: str = "echo", **fields: Any) -> dict[str, Any]:
        parameters = {"model": model, "messages": [{"role": "user", "content": content}]}
        answer = await self.post({"flow": "chat", "parameters": parameters, **fields})
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def get(self, job: dict[str, Any]) -> dict[str, Any]:
        return dict((await self.http.get(f"/v1/jobs/{job['id']}")).raise_for_status().json())

    async def until(self, job: dict[str, Any], *states: str, timeout_s: float = 60) -> dict[str, Any]:
        """The job once it is in one of `states`."""
        async with asyncio.timeout(timeout_s):
            while (seen := await self.get(job))["status"] not in states:
                await asyncio.sleep(0.05)
        return seen

    async def over(self, job: dict[str, Any], timeout_s: float = 60) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            while (seen := await self.get(job))["status"] in OPEN:
                await asyncio.sleep(0.05)
        return seen

    async def result(self, job: dict[str, Any]) -> Any:
        return (await self.http.get(f"/v1/jobs/{job['id']}/result")).raise_for_status().json()


def client_of(smi: Any, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=smi.url, headers=headers, timeout=60, trust_env=False)


@pytest.fixture
def settings(smi: Any) -> Settings:
    return load_settings(home=smi.home)


@pytest.fixture
async def client(smi: Any) -> AsyncIterator[Client]:
    async with client_of(smi, smi.key) as http:
        yield Client(http)


@pytest.fixture
async def stranger(smi: Any, settings: Settings) -> AsyncIterator[Client]:
    """Somebody with another key."""
    engine = create_async_engine(settings.require("database_url"))
    key = await new_key(engine, "stranger")
    await engine.dispose()
    async with client_of(smi, key) as http:
        yield Client(http)


@pytest.fixture
async def prefect(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with prefect_http(settings, timeout_s=30) as http:
        yield http


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[AsyncEngine]:
    """A database of its own, which no processor looks at."""
    url = settings.require("database_url")
    admin = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with admin.connect() as connection:
        await connection.execute(text("DROP DATABASE IF EXISTS jobs_test"))
        await connection.execute(text("CREATE DATABASE jobs_test"))
    await admin.dispose()
    engine = create_async_engine(url.replace("/smi?", "/jobs_test?"))
    await create_tables(engine)
    yield engine
    await engine.dispose()
