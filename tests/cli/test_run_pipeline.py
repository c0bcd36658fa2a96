"""`smi run pipeline.yaml`, through the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

QUESTION = Path(__file__).parent.parent / "data" / "speech" / "question.wav"
PIPELINE = """
name: heard and said back
inputs:
  question: {type: recording}
  words: {type: integer, default: 4}
steps:
  transcribe: {task: transcribe, parameters: {file: $inputs.question}}
  answer:
    task: chat
    model: echo
    parameters:
      max_tokens: $inputs.words
      messages: [{role: user, content: "${transcribe.text}"}]
  speak: {task: speak, parameters: {input: "Paris.", response_format: wav}}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


def test_it_is_followed_step_by_step_and_its_files_are_fetched(
    smi: Any, smi_command: Any, pipeline: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    answer = smi_command(
        *("run", str(pipeline), "--input", f"question={QUESTION}", "--input", "words=2"),
        *("--output", str(made), "--home", str(smi.home), "--json"),
        env={"OPENAI_API_KEY": smi.key},
    )
    assert answer.returncode == 0, answer.stderr
    for step in ("transcribe", "answer", "speak"):
        assert f"  {step}: succeeded" in answer.stderr
    steps = json.loads(answer.stdout)["result"]["steps"]
    assert steps["answer"]["result"]["text"] == " ".join(steps["transcribe"]["result"]["text"].split()[:2])
    (file,) = [path for path in made.rglob("*") if path.is_file()]
    assert file == made / steps["speak"]["result"]["audio"]["name"]
    assert file.read_bytes()[:4] == b"RIFF"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--input question=... is missing"),
        (["question=nothing.wav"], "there is no file nothing.wav"),
        (["words"], "--input 'words' is no NAME=VALUE"),
        (
            ["wrods=2"],
            "'wrods' is no input of this pipeline; there are: question (recording), words (integer)",
        ),
        (["words=1", "words=2"], "is given twice"),
        ([f"question={QUESTION}", "words=many"], "'inputs.words' is wrong"),
    ],
)
def test_inputs_that_do_not_fit_are_told(
    smi: Any, smi_command: Any, pipeline: Path, given: list[str], said: str
) -> None:
    options = [part for pair in given for part in ("--input", pair)]
    answer = smi_command(
        "run", str(pipeline), *options, "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key}
    )
    assert answer.returncode == 1
    assert said in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nname: b\n", 'line 2: found duplicate key "name"'),
        ("- 1\n", "is no pipeline"),
        ("name: a\nsteps: {x: {taks: chat}}\n", "'steps.x.taks' is not a parameter"),
        ("name: a\nsteps: {x: {task: chta, parameters: {}}}\n", "did you mean 'chat'"),
    ],
)
def test_files_that_are_no_pipeline_are_told(
    smi: Any, smi_command: Any, pipeline: Path, text: str, said: str
) -> None:
    pipeline.write_text(text)
    answer = smi_command("run", str(pipeline), "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key})
    assert answer.returncode == 1
    assert said in answer.stderr


def test_a_flow_that_works_on_a_file_asks_for_the_option(smi: Any, smi_command: Any) -> None:
    answer = smi_command("run", "transcribe", "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key})
    assert answer.returncode == 1
    assert "--file PATH" in answer.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["PIPELINE", "--file", str(QUESTION)], "--file is not taken with"),
        (["PIPELINE", "--request", '{"max_tokens": 3}'], "which is a pipeline; use --input"),
        (["chat", "--input", "words=2"], "--input is not taken with chat"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    smi: Any, smi_command: Any, pipeline: Path, options: list[str], said: str
) -> None:
    options = [str(pipeline) if option == "PIPELINE" else option for option in options]
    answer = smi_command("run", *options, "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key})
    assert answer.returncode == 1
    assert said in answer.stderr
