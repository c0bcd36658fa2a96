"""The spool's lines: one JSON array per start and per end of a run. Names, times, states; never content.

An end says all that its start said, so it stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from tasks.live import Label, LiveRun, StepRecord

NUMBER = (int, float)
RUN = (int, str, str, str, NUMBER, NUMBER, str, str, dict, list)
START = 5  # values of a start
STEP = (str, NUMBER, NUMBER, str, str)


@dataclass(slots=True)
class Record:
    """A run as the spool tells it. `key` counts the runs of one API process; `state` is Prefect's.

    `owner` is the name of the key. `flow_run_id` is known once the run was created in Prefect while it was
    still going on.
    """

    key: int
    flow: str
    request_id: str
    owner: str
    started: float
    ended: float = 0.0
    state: str = "RUNNING"
    message: str = ""
    labels: dict[str, Label] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    flow_run_id: str | None = None

    @property
    def over(self) -> bool:
        return self.state != "RUNNING"


def start_line(key: int, run: LiveRun) -> bytes:
    begun = (key, run.flow, run.request_id, run.principal.name, run.started)
    return orjson.dumps(begun, option=orjson.OPT_APPEND_NEWLINE)


def end_line(key: int, run: LiveRun) -> bytes:
    steps = [(step.name, step.started, step.ended, step.state, step.message) for step in run.steps]
    return orjson.dumps(
        (
            key,
            run.flow,
            run.request_id,
            run.principal.name,
            run.started,
            run.ended,
            run.state,
            run.message,
            run.labels,
            steps,
        ),
        default=str,
        option=orjson.OPT_APPEND_NEWLINE,
    )


def parse(line: bytes) -> Record:
    """The record in a line.

    Raises:
        ValueError: the line is damaged, or another version's.
    """
    values = orjson.loads(line)
    if not (_has(values, RUN) or _has(values, RUN[:START])):
        raise ValueError("not a line of the spool")
    if len(values) == START:
        return Record(*values)
    *values, steps = values
    if not all(_has(step, STEP) for step in steps):
        raise ValueError("not a line of the spool")
    record = Record(*values)
    record.steps = [StepRecord(*step) for step in steps]
    return record


def _has(values: object, shape: tuple[type | tuple[type, ...], ...]) -> bool:
    return (
        isinstance(values, list)
        and len(values) == len(shape)
        and all(isinstance(value, kind) for value, kind in zip(values, shape, strict=True))
    )
