"""The steps of live runs, as task runs in Prefect.

Prefect makes task runs from events that wait in its memory: when its queue is full, or it dies, events
are lost that it had accepted. So it is looked after each whether it became a task run; what did not is
posted again under the same ids, and what waits is bounded, so that catching up floods nobody's queue.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from deployments.recorder.calls import Calls, Refused, clean, parts
from deployments.recorder.lines import Record
from tasks.live import StepRecord

EVENT_LIMIT = 200  # per call; as many task runs as one look-up returns
WINDOW = 800  # events that may wait for Prefect, whose queue holds 10,000 from all sides
REPOST_S = 15.0
REPOSTS = 4

log = logging.getLogger("smi.recorder")
Event = dict[str, Any]


@dataclass(slots=True)
class Posted:
    """Steps by their task run's id, with the flow run's, that Prefect has accepted."""

    events: dict[str, tuple[str, Event]]
    since: float = field(default_factory=time.monotonic)
    times: int = 1


class PrefectSteps:
    """Posts steps of one API process (`name`), and sees to it that they arrive."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self._calls = calls
        self._posted: deque[Posted] = deque()

    @property
    def full(self) -> bool:
        return sum(len(posted.events) for posted in self._posted) >= WINDOW

    async def post(self, runs: Sequence[Record]) -> None:
        steps = [
            (key, (str(run.flow_run_id), event)) for run in runs for key, event in events(self.name, run)
        ]
        for part in parts(steps, EVENT_LIMIT):
            await self._post(part)
            self._posted.append(Posted(dict(part)))

    async def confirm(self) -> None:
        """Look whether the oldest steps that wait have arrived.

        Raises:
            Away: look again later.
        """
        while self._posted:
            posted = self._posted[0]
            for key in await self._known("/task_runs/filter", "task_runs", list(posted.events)):
                del posted.events[key]
            if posted.events:
                await self._again(posted)
            if posted.events:
                return
            self._posted.popleft()

    async def _again(self, posted: Posted) -> None:
        if time.monotonic() - posted.since < REPOST_S:
            return
        runs = await self._known("/flow_runs/filter", "flow_runs", [run for run, _ in posted.events.values()])
        posted.events = {key: pair for key, pair in posted.events.items() if pair[0] in runs}
        if posted.times > REPOSTS:
            log.error("Prefect makes no task runs of %d steps; they are given up", len(posted.events))
            posted.events = {}
        await self._post(list(posted.events.items()))
        posted.since, posted.times = time.monotonic(), posted.times + 1

    async def _known(self, path: str, kind: str, ids: list[str]) -> set[str]:
        found = await self._calls.post(path, {kind: {"id": {"any_": ids}}})
        return {entry["id"] for entry in found}

    async def _post(self, steps: Sequence[tuple[str, tuple[str, Event]]]) -> None:
        if not steps:
            return
        try:
            await self._calls.post("/events", [event for _, (_, event) in steps])
        except Refused as error:
            if len(steps) == 1:
                log.error("Prefect refuses the record of a step: %s", error)
                return
            middle = len(steps) // 2
            await self._post(steps[:middle])
            await self._post(steps[middle:])


def events(name: str, run: Record) -> Iterator[tuple[str, Event]]:
    """The events from which Prefect makes task runs, by the task run's id, in the shape of its engine's."""
    seen: Counter[str] = Counter()
    for step in run.steps:
        number = seen[step.name]
        seen[step.name] += 1
        key = str(uuid5(NAMESPACE_URL, f"{name}:{run.key}:{step.name}:{number}"))
        yield key, _event(key, number, step, run)


def _event(key: str, number: int, step: StepRecord, run: Record) -> Event:
    ended = step.ended or run.ended
    message, label = clean(step.message), step.state.capitalize()
    title = f"{step.name}-{number}" if number else step.name
    return {
        "id": str(uuid5(NAMESPACE_URL, f"{key}:{step.state}")),
        "occurred": _time(ended),
        "event": f"prefect.task-run.{label}",
        "resource": {
            "prefect.resource.id": f"prefect.task-run.{key}",
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
