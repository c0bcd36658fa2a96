"""The Prefect server of an embedded installation: on our PostgreSQL, behind an auth string, on loopback."""

from __future__ import annotations

import sys

import httpx

from blocks.settings import Settings
from deployments.up import postgres

NICE = 10  # live requests outrank bookkeeping


def command(settings: Settings) -> list[str]:
    server = [sys.executable, "-P", "-m", "prefect", "server", "start"]
    return [*server, "--host", settings.host, "--port", str(settings.prefect_port)]


def environment(settings: Settings) -> dict[str, str]:
    """What the server needs beside what every child gets."""
    return {
        "PREFECT_API_DATABASE_CONNECTION_URL": postgres.url(settings.home / "postgres", "prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": settings.require("prefect_auth"),
        # With the defaults (1 and 5 s) one event that fails holds up all later task runs.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


async def answers(settings: Settings) -> bool:
    """Whether the server is up; its health needs no login."""
    return await http_answers(f"{settings.require('prefect_url')}/health")


async def http_answers(url: str) -> bool:
    """Whether a GET of `url` succeeds within 2 s."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=2) as http:
            return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False
