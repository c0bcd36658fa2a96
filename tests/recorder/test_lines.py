"""The spool's lines say all that the record needs, and a damaged one is known for it."""

import pytest

from deployments.recorder.lines import end_line, parse, start_line
from deployments.recorder.prefect_runs import labels, name_of, state, tags
from tasks.live import LiveRun, StepRecord
from tasks.principal import Principal


def test_a_line_comes_back_as_it_was() -> None:
    step = StepRecord("generate", 1.25, 2.5, "FAILED", "overloaded: every slot is taken")
    run = LiveRun(
        "chat",
        "req_1",
        1.0,
        steps=[step],
        labels={"model": "echo", "tokens": 3},
        ended=2.75,
        principal=Principal("anna", 3, "any"),
    )
    begun, over = parse(start_line(7, run)), parse(end_line(7, run))
    assert (begun.key, begun.flow, begun.request_id, begun.started, begun.over) == (
        7,
        "chat",
        "req_1",
        1.0,
        False,
    )
    assert (over.key, over.started, over.ended, over.state, over.over) == (7, 1.0, 2.75, "COMPLETED", True)
    assert (name_of(begun), name_of(over)) == ("chat for anna (req_1)", "chat echo for anna (req_1)")
    assert (over.steps, over.labels) == ([step], run.labels)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[7,",
        b"{}",
        b"[1,2]",
        b'["x","chat","r","o",1.0]',
        b'[7,"chat","r","o","1.0"]',
        b'[7,"chat","r",1.0]',
        b"[1,2,3,4,5,6,7,8,9,10]",
        b'[7,"chat","r","o",1.0,2.0,"COMPLETED","",{},[],"of another version"]',
        b'[7,"chat","r","o",1.0,2.0,"COMPLETED","",{},[["generate",1.0,2.0,"COMPLETED","",3]]]',
    ],
)
def test_a_damaged_line_is_known(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (orjson's own is a ValueError too)
        parse(line)


def test_what_prefect_would_refuse_is_made_fit() -> None:
    run = LiveRun(
        "chat", "req\0", 1.0, labels={"rate": float("nan"), "model": "e\0"}, ended=3.5, message="a\0"
    )
    record = parse(end_line(1, run))
    assert labels(record)["rate"] == "None"  # JSON has no NaN
    assert "\0" not in str([labels(record), tags(record), state(record)])
    assert labels(record)["duration_s"] == 2.5
