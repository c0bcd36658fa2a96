"""Jobs as Prefect flow runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from deployments.jobs.store import Job
from deployments.jobs.stored import Stored
from tasks.prefect_api import TERMINAL

PAGE = 200  # Prefect's limit


class NotStarted(Exception):
    """Prefect answers and will not take the run; says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """A flow run as Prefect knows it; `worker` holds it, `since` and `message` are its state's."""

    id: str
    state: str
    state_name: str
    worker: str | None
    since: datetime
    message: str = ""

    @classmethod
    def read(cls, found: dict[str, Any]) -> Run:
        return cls(
            found["id"],
            found["state_type"],
            found["state_name"],
            found["infrastructure_pid"],
            datetime.fromisoformat(found["state"]["timestamp"]),
            found["state"]["message"] or "",
        )


class Runs:
    """The calls that the processor makes. Each raises `httpx.HTTPError` while Prefect is away."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._deployments: dict[str, tuple[str, str]] = {}

    async def deployed(self, flow: str) -> bool:
        """Whether Prefect has the deployment `<flow>/smi`."""
        if flow not in self._deployments:
            answer = await self._http.get(f"/deployments/name/{flow}/smi")
            if answer.status_code == httpx.codes.NOT_FOUND:
                return False
            deployment = answer.raise_for_status().json()
            self._deployments[flow] = (deployment["id"], deployment["flow_id"])
        return True

    async def start(self, job: Job, title: str) -> str:
        """Create the flow run of the job's attempt, or find the one that was created before; its id.

        Its name is `title`, which says what and whose; its tags find it.

        It names the pool itself: a deployment's own call for runs keeps to that deployment's pool, and
        would check the reference against the flow's parameters.

        Raises:
            NotStarted: the deployment, pool or queue is gone, or Prefect refuses.
        """
        if not await self.deployed(job.flow):
            raise NotStarted(f"deployment {job.flow}/smi is missing")
        deployment_id, flow_id = self._deployments[job.flow]
        answer = await self._http.post(
            "/flow_runs/",
            json={
                "name": title,
                "flow_id": flow_id,
                "deployment_id": deployment_id,
                "parameters": {"request": Stored.of(job.id, job.attempt, job.priority).model_dump()},
                "idempotency_key": _key(job),
                "work_pool_name": job.pool,
                "work_queue_name": job.priority,
                "tags": ["job", job.id, job.request_id, f"model:{job.model}"],
                "state": {"type": "SCHEDULED"},
            },
        )
        if answer.is_error:
            self._deployments.pop(job.flow)
            raise NotStarted(f"Prefect answered {answer.status_code} for queue {job.pool}/{job.priority}")
        return str(answer.json()["id"])

    async def of(self, job: Job) -> str | None:
        """The run of the job's attempt, if one was created."""
        wanted = {"idempotency_key": {"any_": [_key(job)]}}
        answer = await self._http.post("/flow_runs/filter", json={"flow_runs": wanted})
        return next((str(run["id"]) for run in answer.raise_for_status().json()), None)

    async def ended(self, ids: Collection[str]) -> list[Run]:
        return await self._read(ids, {"type": {"any_": TERMINAL}})

    async def all(self, ids: Collection[str]) -> list[Run]:
        return await self._read(ids, None)

    async def _read(self, ids: Collection[str], state: dict[str, Any] | None) -> list[Run]:
        listed, found = list(ids), []
        for start in range(0, len(listed), PAGE):
            runs = {"id": {"any_": listed[start : start + PAGE]}} | ({"state": state} if state else {})
            answer = await self._http.post("/flow_runs/filter", json={"flow_runs": runs, "limit": PAGE})
            found += [Run.read(run) for run in answer.raise_for_status().json()]
        return found

    async def cancel(self, run_id: str) -> None:
        """Ask the worker to stop the run; one that no worker holds is cancelled at once."""
        await self._set(run_id, {"type": "CANCELLING"}, force=False)

    async def give_up(self, run: Run, why: str) -> None:
        """End a run whose worker is gone."""
        kind: Literal["CANCELLED", "CRASHED"] = "CANCELLED" if run.state == "CANCELLING" else "CRASHED"
        await self._set(run.id, {"type": kind, "message": why}, force=True)

    async def _set(self, run_id: str, state: dict[str, str], force: bool) -> None:
        answer = await self._http.post(
            f"/flow_runs/{run_id}/set_state", json={"state": state, "force": force}
        )
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()

    async def silences(self, pool: str) -> dict[str, float]:
        """Seconds since each worker of the pool was last heard, by Prefect's own clock."""
        answer = await self._http.post(f"/work_pools/{pool}/workers/filter", json={})
        if answer.status_code == httpx.codes.NOT_FOUND:  # the pool was deleted, and its workers with it
            return {}
        now = parsedate_to_datetime(answer.raise_for_status().headers["date"])
        heard = {worker["name"]: worker["last_heartbeat_time"] for worker in answer.json()}
        return {name: (now - datetime.fromisoformat(at)).total_seconds() for name, at in heard.items() if at}


def _key(job: Job) -> str:
    return f"{job.id}:{job.attempt}"
