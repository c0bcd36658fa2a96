"""Old records of live runs leave Prefect, by age and by count: the oldest first, in small batches.

Several recorders may do this at once: each deletes what is there, and what is gone is not missed.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from deployments.recorder.prefect_runs import TAG

BATCH = 50  # Prefect's limit for a deletion
PAUSE_S = 1.0
ROUND_S = 180.0
OVER = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]

log = logging.getLogger("smi.recorder")


async def keep_within(http: httpx.AsyncClient, days: float, most: int) -> None:
    """Keep records for `days`, and at most `most` of them, for ever."""
    while True:
        try:
            await clean_up(http, days, most, PAUSE_S)
        except httpx.HTTPError as error:
            log.debug("records are not cleaned up now: %s", type(error).__name__)
        await asyncio.sleep(ROUND_S)


async def clean_up(http: httpx.AsyncClient, days: float, most: int, pause_s: float = 0.0) -> int:
    """Delete what is too old or too much now; the number of runs deleted.

    Raises:
        httpx.HTTPError: Prefect is away, or refuses.
    """
    deleted = 0
    cutoff = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    aged = {**_live(), "expected_start_time": {"before_": cutoff}}
    while count := await _delete(http, aged, BATCH):
        deleted += count
        await asyncio.sleep(pause_s)
    answer = await _post(http, "/flow_runs/count", {"flow_runs": _live()})
    excess = int(answer) - most
    while excess > 0:
        oldest = {
            "flow_runs": _live(),
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": min(BATCH, excess),
        }
        ids = [run["id"] for run in await _post(http, "/flow_runs/filter", oldest)]
        count = await _delete(http, {**_live(), "id": {"any_": ids}}, BATCH)
        excess -= len(ids)
        deleted += count
        if not ids:
            break
        await asyncio.sleep(pause_s)
    return deleted


def _live() -> dict[str, Any]:
    """Live runs that are over."""
    return {"tags": {"all_": [TAG]}, "state": {"type": {"any_": OVER}}}


async def _delete(http: httpx.AsyncClient, which: dict[str, Any], most: int) -> int:
    answer = await _post(http, "/flow_runs/bulk_delete", {"flow_runs": which, "limit": most})
    return len(answer["deleted"])


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    answer.raise_for_status()
    return answer.json()
