"""Live runs as Prefect keeps them: flow runs of a deployment `live`, with their steps as task runs.

Every write may be repeated: runs are created under an idempotency key, steps under ids derived from it,
and with `doubt` the states in Prefect are looked at before a run is completed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from deployments.recorder.calls import Away, Calls, Gone, Refused, clean, parts
from deployments.recorder.lines import Record
from deployments.recorder.prefect_steps import PrefectSteps
from tasks.live import Label

CREATE_LIMIT, STATE_LIMIT = 100, 50  # Prefect's, per call
PARALLEL = 4
TAG = "live"
DEPLOYMENT = "smi-live"  # sorts behind `smi`, which people start

log = logging.getLogger("smi.recorder")


class PrefectRuns:
    """Writes runs of one API process (`name`). Counts those that Prefect refused in `failed`."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self.failed = 0
        self.steps = PrefectSteps(calls, name)
        self._calls = calls
        self._deployments: dict[str, str] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    async def write(self, over: Sequence[Record], running: Sequence[Record], doubt: bool) -> None:
        """Write runs that are over and runs that go on.

        Raises:
            Away: some of it may be written; write all of it again, with `doubt`.
        """
        self.failed = 0
        finish = [run for run in over if run.flow_run_id is not None]
        new = [run for run in (*over, *running) if run.flow_run_id is None]
        by_flow: dict[str, list[Record]] = defaultdict(list)
        for run in new:
            by_flow[run.flow].append(run)
        for flow, runs in by_flow.items():
            for part in parts(runs, CREATE_LIMIT):
                await self._create(flow, part)
        if doubt:
            finish = await self._unfinished([run for run in over if run.flow_run_id is not None])
        await self._finish(finish)
        await self.steps.post([run for run in over if run.flow_run_id is not None and run.steps])

    async def _create(self, flow: str, runs: Sequence[Record]) -> None:
        try:
            deployment = await self._deployment(flow)
            path = f"/deployments/{deployment}/create_flow_run/bulk"
            answer = await self._calls.post(path, [creation(self.name, run) for run in runs])
            results = answer["results"]
            refused = next((result for result in results if result["status"] != "CREATED"), None)
            if refused is not None:  # its database error may have undone its neighbours too
                raise Refused(refused["error"])
        except Gone:
            self._deployments.clear()
            raise
        except Refused as error:
            await self._halves(flow, runs, error)
            return
        for run, result in zip(runs, results, strict=True):
            run.flow_run_id = result["flow_run_id"]

    async def _halves(self, flow: str, runs: Sequence[Record], error: Refused) -> None:
        if len(runs) == 1:
            if self._calls.bisect_500 and not await self._calls.healthy():
                raise Away("Prefect lost its database")
            self._fail(runs[0], error)
            return
        middle = len(runs) // 2
        await self._create(flow, runs[:middle])
        await self._create(flow, runs[middle:])

    async def _deployment(self, flow: str) -> str:
        if flow not in self._deployments:
            answer = await self._calls.post("/flows/", {"name": flow})
            body = {
                "name": DEPLOYMENT,
                "flow_id": answer["id"],
                "description": "The record of live requests. They ran in the API; this cannot be started.",
                "tags": [TAG],
                "paused": True,
                "enforce_parameter_schema": False,
            }
            answer = await self._calls.post("/deployments/", body)
            self._deployments[flow] = answer["id"]
        return self._deployments[flow]

    async def _unfinished(self, runs: Sequence[Record]) -> list[Record]:
        """Those of `runs` that Prefect does not know to be over."""
        over: set[str] = set()
        for part in parts(runs, CREATE_LIMIT):
            ids = [run.flow_run_id for run in part]
            answer = await self._calls.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
            over |= {run["id"] for run in answer if run["state_type"] not in ("RUNNING", "CANCELLING")}
        return [run for run in runs if run.flow_run_id not in over]

    async def _finish(self, runs: Sequence[Record]) -> None:
        """Complete runs that were created as running: what was learnt since, then the state."""
        await gather(self._describe(run) for run in runs)
        alike: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for run in runs:
            alike[run.state, run.message].append(run)
        for same in alike.values():
            for part in parts(same, STATE_LIMIT):
                await self._set_state(part)

    async def _describe(self, run: Record) -> None:
        path = f"/flow_runs/{run.flow_run_id}"
        async with self._slots:
            try:
                await self._calls("PATCH", f"{path}/labels", labels(run))
                await self._calls("PATCH", path, {"tags": tags(run)})
            except Refused as error:
                log.warning("Prefect does not take the labels of run %s: %s", run.request_id, error)

    async def _set_state(self, runs: Sequence[Record]) -> None:
        body = {
            "flow_runs": {"id": {"any_": [run.flow_run_id for run in runs]}},
            "state": state(runs[0]),
            "force": True,
        }
        try:
            answer = await self._calls.post("/flow_runs/bulk_set_state", body)
        except Refused as error:
            for run in runs:
                self._fail(run, error)
            return
        done = {result["flow_run_id"] for result in answer["results"] if result["status"] == "ACCEPT"}
        for run in runs:
            if run.flow_run_id not in done:
                self._fail(run, Refused("it was deleted, or may not enter this state"))

    def _fail(self, run: Record, error: Refused) -> None:
        self.failed += 1
        run.flow_run_id = None
        log.error("Prefect refuses the record of run %s of %s: %s", run.request_id, run.flow, error)


async def gather(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all calls to their end, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def creation(name: str, run: Record) -> dict[str, Any]:
    """A run as Prefect creates it."""
    return {
        "name": name_of(run),
        "idempotency_key": f"{name}:{run.key}",
        "state": state(run),
        "tags": tags(run),
        "labels": labels(run),
    }


def name_of(run: Record) -> str:
    """What and whose. The model is not known yet of a run that is recorded while it begins."""
    what = f"{run.flow} {run.labels['model']}" if "model" in run.labels else run.flow
    return clean(f"{what} for {run.owner} ({run.request_id})")


def state(run: Record) -> dict[str, str]:
    return {"type": run.state, "message": clean(run.message)}


def tags(run: Record) -> list[str]:
    known = [f"{name}:{run.labels[name]}" for name in ("tier", "model") if name in run.labels]
    return [clean(tag) for tag in (run.request_id, TAG, *known)]


def labels(run: Record) -> dict[str, Label]:
    """The run's labels and its true times: Prefect's own are those of the record."""
    found: dict[str, Label] = {clean(name): _label(value) for name, value in run.labels.items()}
    found |= {"request_id": clean(run.request_id), "started": run.started}
    if run.over:
        found |= {"ended": run.ended, "duration_s": round(run.ended - run.started, 6)}
    return found


def _label(value: object) -> Label:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int) else clean(str(value))
