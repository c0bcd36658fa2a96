"""Pipelines that cannot be run are refused before anything runs, by the step's name."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from blocks.errors import SmiError
from blocks.storage import Media, Picture, Recording
from blocks.yaml import read_yaml
from deployments.jobs.requests import parsed
from flows.kinds import sample
from flows.pipeline import PipelineRequest
from flows.registry import STEPS

CLIP = Path(__file__).parent.parent / "data" / "speech" / "question.wav"
GOOD: dict[str, Any] = read_yaml(
    """
name: spoken question
inputs:
  question: {type: recording}
  picture: {type: picture}
  length: {type: integer, default: 60}
  tone: {type: string, default: friendly}
steps:
  transcribe: {task: transcribe, parameters: {file: $inputs.question}}
  answer:
    task: chat
    model: echo
    priority: high
    parameters:
      max_tokens: $inputs.length
      messages:
        - {role: system, content: "Be ${inputs.tone}; it costs $$5."}
        - {role: user, content: "${transcribe.text} (${transcribe.duration} s)"}
  speak: {task: speak, after: [cut], parameters: {input: $answer.text}}
  cut: {task: cutout, parameters: {file: $inputs.picture}}
  big: {task: upscale, parameters: {file: $cut.picture, scale: 4}}
""",
    "pipeline",
)
FILES = {"question": Recording(reference="jobs/a/inputs/question"), "picture": Picture(reference="b")}
MESSAGES = "steps.answer.parameters.messages[1].content"

# What is set where in the good pipeline (None: taken out), the parameter at fault, words of the error.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown task": ({"steps.answer.task": "chatt"}, "steps.answer.task", "did you mean 'chat'"),
    "nested pipeline": ({"steps.answer.task": "pipeline"}, "steps.answer.task", "there is no task"),
    "no task": ({"steps.cut.task": None}, "steps.cut.task", "is missing"),
    "unknown step": (
        {"steps.speak.parameters.input": "$reply.text"},
        "steps.speak.parameters.input",
        "'reply'",
    ),
    "unknown step in after": ({"steps.speak.after": ["cut", "no"]}, "steps.speak.after[1]", "'no'"),
    "unknown field": (
        {"steps.speak.parameters.input": "$answer.words"},
        "steps.speak.parameters.input",
        "there are: text, finish_reason",
    ),
    "field of a text": (
        {"steps.speak.parameters.input": "$answer.text.more"},
        "steps.speak.parameters.input",
        "a text has no field 'more'",
    ),
    "element of no list": (
        {"steps.speak.parameters.input": "$answer.text[0]"},
        "steps.speak.parameters.input",
        "has no element [0]",
    ),
    "cycle": (
        {"steps.transcribe.after": ["speak"]},
        "steps.transcribe",
        "transcribe -> speak -> answer -> transcribe",
    ),
    "itself": ({MESSAGES: "${answer.text}"}, MESSAGES, "its own step"),
    "after itself": ({"steps.cut.after": ["cut"]}, "steps.cut.after[0]", "its own step"),
    "missing parameter": (
        {"steps.speak.parameters.input": None},
        "steps.speak.parameters.input",
        "is missing",
    ),
    "unknown parameter": (
        {"steps.answer.parameters.max_token": 3},
        "steps.answer.parameters.max_token",
        "is not a parameter",
    ),
    "unknown field of a step": ({"steps.answer.prio": "low"}, "steps.answer.prio", "is not a parameter"),
    "literal of another type": (
        {"steps.answer.parameters.max_tokens": "60"},
        "steps.answer.parameters.max_tokens",
        "should be a valid integer",
    ),
    "text into a file": (
        {"steps.big.parameters.file": "$answer.text"},
        "steps.big.parameters.file",
        "$answer.text is a text",
    ),
    "picture into a recording": (
        {"steps.transcribe.parameters.file": "$inputs.picture"},
        "steps.transcribe.parameters.file",
        "a picture, and a recording is needed",
    ),
    "speech into a picture": (
        {"steps.big.parameters.file": "$speak.audio"},
        "steps.big.parameters.file",
        "a recording, and a picture is needed",
    ),
    "a whole result into a file": (
        {"steps.big.parameters.file": "$cut"},
        "steps.big.parameters.file",
        "an object of picture, width, height",
    ),
    "text into a number": (
        {"steps.answer.parameters.max_tokens": "$transcribe.text"},
        "steps.answer.parameters.max_tokens",
        "$transcribe.text is a text",
    ),
    "a number with a fraction into a whole one": (
        {"steps.answer.parameters.max_tokens": "$transcribe.duration"},
        "steps.answer.parameters.max_tokens",
        "$transcribe.duration is a number",
    ),
    "list into a text": (
        {"steps.speak.parameters.input": "$transcribe.segments"},
        "steps.speak.parameters.input",
        "is a list",
    ),
    "list inside a text": ({MESSAGES: "It says ${transcribe.segments}"}, MESSAGES, "is a list"),
    "file inside a text": ({MESSAGES: "Look: ${cut.picture}"}, MESSAGES, "is a picture"),
    "out of range": ({"steps.big.parameters.scale": 3}, "steps.big.parameters.scale", "should be 2 or 4"),
    "an input out of range": (
        {"inputs.length.default": 0},
        "steps.answer.parameters.max_tokens",
        "greater than or equal to 1",
    ),
    "unknown model": ({"steps.answer.model": "gpt-9"}, "steps.answer.model", "'gpt-9' does not exist"),
    "model of another kind": ({"steps.answer.model": "whisper-tiny.en"}, "steps.answer.model", "not chat"),
    "model among parameters": (
        {"steps.answer.parameters.model": "echo"},
        "steps.answer.parameters.model",
        "'steps.answer.model'",
    ),
    "bad priority": (
        {"steps.answer.priority": "urgent"},
        "steps.answer.priority",
        "'high', 'normal' or 'low'",
    ),
    "unknown input": (
        {"steps.cut.parameters.file": "$inputs.photo"},
        "steps.cut.parameters.file",
        "question, picture, length, tone",
    ),
    "all inputs": ({"steps.cut.parameters.file": "$inputs"}, "steps.cut.parameters.file", "name an input"),
    "missing input": ({"inputs.tone.default": None}, "inputs.tone", "is missing"),
    "unused input": ({"inputs.more": {"type": "string", "default": "x"}}, "inputs.more", "used by no step"),
    "default of another type": (
        {"inputs.length.default": "60"},
        "inputs.length",
        "should be a valid integer",
    ),
    "default of a file": ({"inputs.picture.default": "cat.jpg"}, "inputs.picture.default", "handed in"),
    "unknown type of input": ({"inputs.tone.type": "video"}, "inputs.tone.type", "'recording'"),
    "bad name of a step": (
        {"steps.Über": {"task": "speak", "parameters": {"input": "x"}}},
        "steps.Über",
        "small letter",
    ),
    "step called inputs": (
        {"steps.inputs": {"task": "speak", "parameters": {"input": "x"}}},
        "steps.inputs",
        "is not 'inputs'",
    ),
    "no steps": ({"steps": {}}, "steps", "at least one step"),
    "too many steps": (
        {"steps": {f"s{n}": {"task": "speak", "parameters": {"input": "x"}} for n in range(101)}},
        "steps",
        "at most 100",
    ),
    "no name": ({"name": None}, "name", "is missing"),
    "a dollar that is no reference": ({MESSAGES: "It costs $5"}, MESSAGES, "$$ for a dollar"),
    "reference without braces in a text": ({MESSAGES: "Say $transcribe.text"}, MESSAGES, "${step.field}"),
    "broken reference": (
        {"steps.speak.parameters.input": "$answer..text"},
        "steps.speak.parameters.input",
        "begins no reference",
    ),
    "file by path": (
        {"steps.cut.parameters.file": {"path": "/etc/passwd"}},
        "steps.cut.parameters.file",
        "names a file itself",
    ),
    "a file that is none": (
        {"steps.cut.parameters.file": {"name": "x.png"}},
        "steps.cut.parameters.file",
        "names a file itself, or none",
    ),
    "a file of nothing": (
        {"steps.cut.parameters.file": {"reference": None, "path": None}},
        "steps.cut.parameters.file",
        "names a file itself, or none",
    ),
    "another job's file": (
        {"steps.cut.parameters.file": {"reference": "jobs/job_b/inputs/file"}},
        "steps.cut.parameters.file",
        "names a file itself",
    ),
    "a file named by a model": (
        {"steps.cut.parameters.file": {"reference": "$answer.text"}},
        "steps.cut.parameters.file",
        "names a file itself",
    ),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(GOOD)
    for where, value in changes.items():
        *way, last = where.replace("[1]", ".1").split(".")
        inside: Any = made
        for part in way:
            inside = inside[int(part) if part.isdecimal() else part]
        if value is None:
            inside.pop(last)
        else:
            inside[last] = value
    return made


def test_the_good_pipeline_is_taken() -> None:
    request = parsed(PipelineRequest, {"pipeline": GOOD, "inputs": dict(FILES)})
    assert set(request.plan.steps["speak"].needs) == {"answer", "cut"}
    again = PipelineRequest.model_validate_json(request.model_dump_json(exclude_unset=True))
    assert again.plan.inputs["length"] == 60
    picture = again.plan.inputs["picture"]
    assert isinstance(picture, Picture)
    assert picture.reference == "b"


def many(count: int, reference: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": reference} for _ in range(count)]
    chat = {"task": "chat", "model": "echo", "parameters": {"messages": messages}}
    return {
        "name": "a",
        "inputs": {"a": {"type": "string"}},
        "steps": {"x": chat, "y": {"task": "speak", "parameters": {"input": "$inputs.a"}}},
    }


@pytest.mark.parametrize(
    ("pipeline", "length", "param", "said"),
    [
        (many(1000, "$inputs.a"), 10, "steps.y.parameters.input", "a pipeline may have 1000"),
        (many(1, "${inputs.a}" * 3000), 10, MESSAGES.replace("answer", "x").replace("1", "0"), "too many"),
        (many(900, "$inputs.a"), 90_000, "steps.x.parameters.messages[44].content", "refer to less"),
        (many(1, "${inputs.a}"), 100_001, "inputs.a", "at most 100000 characters, not 100001"),
        (many(4000, "text" * 10), 1, "pipeline", "at most 131072 characters as JSON"),
    ],
)
def test_little_that_would_become_much_is_refused_soon(
    pipeline: dict[str, Any], length: int, param: str, said: str
) -> None:
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(SmiError) as refused:
        parsed(PipelineRequest, {"pipeline": pipeline, "inputs": {"a": "x" * length}})
    seconds, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (refused.value.param, said in refused.value.message) == (param, True), refused.value.message
    assert seconds < 5
    assert most < 60e6


@pytest.mark.parametrize("task", STEPS)
def test_what_each_task_returns_can_be_referred_to(task: str) -> None:
    result, problems = STEPS[task].result, set()
    try:
        result.model_validate_json(json.dumps(sample(result, lambda kind: "sample")), strict=True)
    except ValidationError as error:
        problems = {detail["type"] for detail in error.errors()}
    assert problems <= {"value_error"}  # what only a true value can be, such as an identity


@pytest.mark.parametrize("name", [name for name in REFUSED if "model" not in name.split()[:2]])
def test_what_cannot_be_run_is_refused_by_name(name: str) -> None:
    changes, param, said = REFUSED[name]
    with pytest.raises(SmiError) as refused:
        parsed(PipelineRequest, {"pipeline": changed(changes), "inputs": dict(FILES)})
    assert (refused.value.param or "").removeprefix("pipeline.") == param
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"question": FILES["question"]}, "inputs.picture", "is missing"),
        ({**FILES, "photo": 1}, "inputs.photo", "is no input"),
        ({**FILES, "length": "many"}, "inputs.length", "valid integer"),
        ({**FILES, "length": True}, "inputs.length", "valid integer"),
        ({**FILES, "picture": "cat.jpg"}, "inputs.picture", "send the file in a form"),
        ({**FILES, "picture": FILES["question"]}, "inputs.picture", "Picture"),
        ({**FILES, "picture": Media(reference="b")}, "inputs.picture", "Picture"),
    ],
)
def test_inputs_are_as_the_pipeline_says(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(SmiError) as refused:
        parsed(PipelineRequest, {"pipeline": GOOD, "inputs": given})
    assert refused.value.param == param
    assert said in refused.value.message


async def test_the_api_refuses_each_before_a_job_is_there(http: httpx.AsyncClient) -> None:
    before = (await http.get("/v1/jobs")).json()["data"]
    for name, (changes, param, said) in REFUSED.items():
        files = {
            "pipeline": ("p.yaml", httpx.Response(200, json=changed(changes)).content),
            "inputs.question": ("q.wav", CLIP.read_bytes()),
            "inputs.picture": ("p.png", b"not looked at before it runs"),
        }
        answer = await http.post("/v1/pipelines", files=files)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404), name
        assert error["param"] == param, (name, error)
        assert said in error["message"], name
    assert (await http.get("/v1/jobs")).json()["data"] == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nname: b", 'line 2: found duplicate key "name"'),
        ("steps:\n  a: {task: chat}\n  a: {task: chat}", 'line 3: found duplicate key "a"'),
        ("a: &x [1]\nb: *x", "line 2: aliases"),
        ("a: [1", "line 1"),
        ('a: 1\nb: "\\ud800"', "line 2: an unpaired surrogate"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: tags"),
        ("a: 1\nb: !!bool foo", "line 2: tags"),
        ("a: !own {}", "line 1: tags"),
        ("a: ! x", "line 1: tags"),
        ("[" * 2000 + "]" * 2000, "nested too deeply"),
        ("x" * 300_000, "at most"),
    ],
)
def test_text_that_is_no_pipeline_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SmiError) as refused:
        read_yaml(text, "pipeline")
    assert said in refused.value.message
