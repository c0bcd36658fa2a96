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
from tasks.prefect_api import TERMINAL

BATCH = 50  # Prefect's limit for a deletion
PAUSE_S = 1.0
ROUND_S = 180.0

log = logging.getLogger("smi.recorder")


async def keep_within(http: httpx.AsyncClient, days: float, most: int) -> None:
    """Keep records for `days`, and at most `most` of them, for ever."""
    while True:
        try:
            await clean_up(http, days, most, PAUSE_S)
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:  # away, or an odd answer
            log.debug("records are not cleaned up now: %s", type(error).__name__)
        await asyncio.sleep(ROUND_S)


async def clean_up(http: httpx.AsyncClient, days: float, most: int, pause_s: float = 0.0) -> int:
    """Delete what is too old or too much now; the number of runs deleted.

    Raises:
        httpx.HTTPError: Prefect is away, or refuses.
    """
    deleted = 0
    too_old = {**_live(), "expected_start_time": {"before_": await _boundary(http, days, most)}}
    while count := await _delete(http, too_old):
        deleted += count
        await asyncio.sleep(pause_s)
    return deleted


async def _boundary(http: httpx.AsyncClient, days: float, most: int) -> str:
    """The time of the newest run that must leave. It is the same for all who ask at once."""
    by_age = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    newest_first = {"flow_runs": _live(), "sort": "EXPECTED_START_TIME_DESC", "offset": most, "limit": 1}
    for run in await _post(http, "/flow_runs/filter", newest_first):
        return max(by_age, str(run["expected_start_time"]), key=datetime.fromisoformat)
    return by_age


def _live() -> dict[str, Any]:
    """Live runs that are over."""
    return {"tags": {"all_": [TAG]}, "state": {"type": {"any_": TERMINAL}}}


async def _delete(http: httpx.AsyncClient, which: dict[str, Any]) -> int:
    answer = await _post(http, "/flow_runs/bulk_delete", {"flow_runs": which, "limit": BATCH})
    return len(answer["deleted"])


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    answer.raise_for_status()
    return answer.json()
