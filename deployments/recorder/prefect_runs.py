"""Live runs as Prefect keeps them: flow runs of a deployment `live`, with their steps as task runs.

Every write may be repeated: runs are created under an idempotency key, steps under ids derived from it,
and with `doubt` the states in Prefect are looked at before a run is completed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, uuid5

import httpx
import orjson

from deployments.recorder.lines import Record
from tasks.live import Label, StepRecord

CREATE_LIMIT, STATE_LIMIT, EVENT_LIMIT = 100, 50, 500  # per call; the first two are Prefect's
PARALLEL = 4
TAG = "live"

log = logging.getLogger("smi.recorder")
T = TypeVar("T")


class Away(Exception):
    """Prefect cannot take it now; the same will do later. The text says why, for the operator."""


class Refused(Exception):
    """Prefect will never take this."""


class PrefectRuns:
    """Writes runs of one API process (`name`). Counts those that Prefect refused in `failed`.

    Attributes:
        bisect_500: take a 500 for a fault in what was sent, and look for the run that causes it.
    """

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self.name = name
        self.bisect_500 = False
        self.failed = 0
        self._http = http
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
        await self._post_steps([run for run in over if run.flow_run_id is not None and run.steps])

    async def healthy(self) -> bool:
        """Whether Prefect and its database answer."""
        try:
            return (await self._http.post("/flows/count", json={})).status_code == 200
        except httpx.HTTPError:
            return False

    async def _create(self, flow: str, runs: Sequence[Record]) -> None:
        try:
            deployment = await self._deployment(flow)
            path = f"/deployments/{deployment}/create_flow_run/bulk"
            answer = await self._call("POST", path, [creation(self.name, run) for run in runs])
            results = answer.json()["results"]
            refused = next((result for result in results if result["status"] != "CREATED"), None)
            if refused is not None:  # its database error may have undone its neighbours too
                raise Refused(refused["error"])
        except Refused as error:
            await self._halves(flow, runs, error)
            return
        for run, result in zip(runs, results, strict=True):
            run.flow_run_id = result["flow_run_id"]

    async def _halves(self, flow: str, runs: Sequence[Record], error: Refused) -> None:
        if len(runs) == 1:
            if self.bisect_500 and not await self.healthy():
                raise Away("Prefect lost its database")
            self._fail(runs[0], error)
            return
        middle = len(runs) // 2
        await self._create(flow, runs[:middle])
        await self._create(flow, runs[middle:])

    async def _deployment(self, flow: str) -> str:
        if flow not in self._deployments:
            answer = await self._call("POST", "/flows/", {"name": flow})
            body = {
                "name": TAG,
                "flow_id": answer.json()["id"],
                "description": "The record of live requests. They ran in the API; this cannot be started.",
                "tags": [TAG],
                "paused": True,
                "enforce_parameter_schema": False,
            }
            answer = await self._call("POST", "/deployments/", body)
            self._deployments[flow] = answer.json()["id"]
        return self._deployments[flow]

    async def _unfinished(self, runs: Sequence[Record]) -> list[Record]:
        """Those of `runs` that Prefect does not know to be over."""
        over: set[str] = set()
        for part in parts(runs, CREATE_LIMIT):
            ids = [run.flow_run_id for run in part]
            answer = await self._call("POST", "/flow_runs/filter", {"flow_runs": {"id": {"any_": ids}}})
            over |= {run["id"] for run in answer.json() if run["state_type"] not in ("RUNNING", "CANCELLING")}
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
                await self._call("PATCH", f"{path}/labels", labels(run))
                await self._call("PATCH", path, {"tags": tags(run)})
            except Refused as error:
                log.warning("Prefect does not take the labels of run %s: %s", run.request_id, error)

    async def _set_state(self, runs: Sequence[Record]) -> None:
        body = {
            "flow_runs": {"id": {"any_": [run.flow_run_id for run in runs]}},
            "state": state(runs[0]),
            "force": True,
        }
        try:
            answer = await self._call("POST", "/flow_runs/bulk_set_state", body)
        except Refused as error:
            for run in runs:
                self._fail(run, error)
            return
        done = {result["flow_run_id"] for result in answer.json()["results"] if result["status"] == "ACCEPT"}
        for run in runs:
            if run.flow_run_id not in done:
                self._fail(run, Refused("it was deleted, or may not enter this state"))

    async def _post_steps(self, runs: Sequence[Record]) -> None:
        events = [event for run in runs for event in step_events(self.name, run)]
        for part in parts(events, EVENT_LIMIT):
            await self._post_events(part)

    async def _post_events(self, events: Sequence[dict[str, Any]]) -> None:
        try:
            await self._call("POST", "/events", events)
        except Refused as error:
            if len(events) == 1:
                log.error("Prefect refuses the record of a step: %s", error)
                return
            middle = len(events) // 2
            await self._post_events(events[:middle])
            await self._post_events(events[middle:])

    def _fail(self, run: Record, error: Refused) -> None:
        self.failed += 1
        run.flow_run_id = None
        log.error("Prefect refuses the record of run %s of %s: %s", run.request_id, run.flow, error)

    async def _call(self, method: str, path: str, body: Any) -> httpx.Response:
        """One request.

        Raises:
            Away: no answer, or one that says try again; also wrong credentials, which are told.
            Refused: any other 4xx.
        """
        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.request(method, path, content=orjson.dumps(body), headers=headers)
        except httpx.HTTPError as error:
            raise Away(f"Prefect does not answer ({type(error).__name__})") from error
        status = answer.status_code
        if status < 400:
            return answer
        if status in (401, 403):
            raise Away(f"Prefect refuses the recorder's credentials ({status}): see SMI_PREFECT_AUTH")
        if status == 404 and path.startswith("/deployments/"):
            self._deployments.clear()
            raise Away("the deployment of the record was deleted; making it anew")
        if status in (408, 429) or (status >= 500 and not (status == 500 and self.bisect_500)):
            raise Away(f"Prefect answers {status}")
        raise Refused(f"{status} on {path.rpartition('/')[2]}")


async def gather(calls: Any) -> None:
    """Run all calls to their end, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def creation(name: str, run: Record) -> dict[str, Any]:
    """A run as Prefect creates it."""
    return {
        "name": clean(run.request_id),
        "idempotency_key": f"{name}:{run.key}",
        "state": state(run),
        "tags": tags(run),
        "labels": labels(run),
    }


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


def clean(text: str) -> str:
    """PostgreSQL stores no NUL."""
    return text.replace("\0", "\ufffd")


def step_events(name: str, run: Record) -> Iterator[dict[str, Any]]:
    """The events from which Prefect makes task runs, in the shape of its engine's own."""
    seen: Counter[str] = Counter()
    for step in run.steps:
        number = seen[step.name]
        seen[step.name] += 1
        yield _step_event(f"{name}:{run.key}:{step.name}:{number}", number, step, run)


def _step_event(key: str, number: int, step: StepRecord, run: Record) -> dict[str, Any]:
    ended = step.ended or run.ended
    message, label = clean(step.message), step.state.capitalize()
    title = f"{step.name}-{number}" if number else step.name
    return {
        "id": str(uuid5(NAMESPACE_URL, f"{key}:{step.state}")),
        "occurred": _time(ended),
        "event": f"prefect.task-run.{label}",
        "resource": {
            "prefect.resource.id": f"prefect.task-run.{uuid5(NAMESPACE_URL, key)}",
            "prefect.resource.name": title,
            "prefect.run-count": "1",
            "prefect.state-message": message,
            "prefect.state-name": label,
            "prefect.state-timestamp": _time(ended),
            "prefect.state-type": step.state,
            "prefect.orchestration": "client",
        },
        "related": [
            {
                "prefect.resource.id": f"prefect.flow-run.{run.flow_run_id}",
                "prefect.resource.role": "flow-run",
                "prefect.resource.name": clean(run.request_id),
            }
        ],
        "payload": {
            "intended": {"from": "RUNNING", "to": step.state},
            "initial_state": {"type": "RUNNING", "name": "Running", "message": "", "state_details": {}},
            "validated_state": {
                "type": step.state,
                "name": label,
                "message": message,
                "state_details": {},
                "data": None,
            },
            "task_run": {
                "name": title,
                "task_key": step.name,
                "dynamic_key": str(number),
                "run_count": 1,
                "flow_run_run_count": 1,
                "expected_start_time": _time(step.started),
                "start_time": _time(step.started),
                "end_time": _time(ended),
                "total_run_time": ended - step.started,
                "tags": [],
                "task_inputs": {},
            },
        },
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
