"""Hints in refusals: the name that was meant, and what a list is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blocks.catalogue import load_catalogue
from blocks.errors import InvalidRequest, ModelNotFound
from blocks.validation import quoted
from deployments.jobs.requests import parsed
from flows.chat import ChatRequest
from flows.definition import Pipeline
from flows.pipeline import PipelineRequest

TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokenz": 3}, "'max_tokenz' is not a parameter here; did you mean 'max_tokens'?"),
        (
            {"messages": [{**TURN, "contents": "y"}]},
            "'messages[0].contents' is not a parameter here; did you",
        ),
        ({"flavour": 3}, "'flavour' is not a parameter here; leave it out"),
        ({"m" * 100: 3}, "is not a parameter here; leave it out"),
        ({"messages": "hello"}, "'messages' is wrong: should be a list of objects: role, content, name"),
        ({"stop": {}}, "'stop' is wrong: should be a valid list"),
    ],
)
def test_a_flows_parameters(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(ChatRequest, {"messages": [TURN], **change})
    assert said in refused.value.message


def pipeline(**step: Any) -> dict[str, Any]:
    first = {"task": "transcribe", "parameters": {"file": "$inputs.question"}}
    second = {"task": "chat", "parameters": {"messages": [{**TURN, "content": "${first.text}"}]}}
    inputs = {"question": {"type": "recording"}}
    return {"name": "a", "inputs": inputs, "steps": {"first": first, "second": {**second, **step}}}


def hand_in(step: dict[str, Any]) -> None:
    defined = parsed(Pipeline, pipeline(**step))
    recording = {"reference": "jobs/a/inputs/question"}
    parsed(PipelineRequest, {"pipeline": defined, "inputs": {"question": recording}})


def asks(content: str) -> dict[str, Any]:
    return {"messages": [{**TURN, "content": content}]}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"tsk": "chat"}, "'steps.second.tsk' is not a parameter here; did you mean 'task'?"),
        ({"task": "sing"}, "there is no task 'sing'; there are: chat, "),
        ({"task": "transcibe"}, "there is no task 'transcibe'; did you mean 'transcribe'? there are: chat, "),
        ({"parameters": {**asks("x"), "max_tokenz": 3}}, "did you mean 'max_tokens'?"),
        (
            {"parameters": asks("${frist.text}")},
            "refers to step 'frist', which is not there; did you mean 'first'? there are: first, inputs",
        ),
        ({"parameters": asks("${input.question}")}, "did you mean 'inputs'?"),
        ({"parameters": asks("${inputs.qestion}")}, "did you mean 'question'? there are: question"),
        ({"after": ["other"]}, "refers to step 'other', which is not there; there are: first, inputs"),
    ],
)
def test_a_pipelines_steps(step: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        hand_in(step)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hf:Qwen/Qwen3-0.6B@main", "'hf:Qwen/Qwen3-0.6B@main'"),
        ("", "''"),
        ("a" * 65, "(a text of 65 characters)"),
        ("my PIN is 1234", "(a text of 14 characters)"),
        ("name\n", "(a text of 5 characters)"),
    ],
)
def test_only_what_looks_like_a_name_is_quoted(value: str, said: str) -> None:
    """Errors are recorded, and a voice or a model may be what another step has written."""
    assert quoted(value) == said


def test_a_model_that_is_none_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^model \(a text of 14 characters\) does not exist"):
        load_catalogue(tmp_path).get("my PIN is 1234")
