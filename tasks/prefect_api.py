"""Prefect's REST API over one kept connection, for what its own client is too slow or too heavy for."""

from __future__ import annotations

import httpx

from blocks.settings import Settings

TERMINAL = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]  # types of states that a run does not leave


def prefect_http(settings: Settings, timeout_s: float = 10) -> httpx.AsyncClient:
    """A client whose paths start at Prefect's `/api`."""
    auth = settings.require("prefect_auth").partition(":")
    return httpx.AsyncClient(
        base_url=settings.require("prefect_url"), auth=(auth[0], auth[2]), timeout=timeout_s, trust_env=False
    )
