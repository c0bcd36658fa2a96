"""`smi chat`, `smi run` and `smi models`, through the API."""

from __future__ import annotations

import json
from pathlib import Path

QUESTION = Path(__file__).parent.parent / "data" / "speech" / "question.wav"


def test_chat_streams_an_answer(smi, smi_command):
    answer = smi_command(
        "chat", "one two three", "--model", "echo", "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key}
    )
    assert answer.returncode == 0, answer.stderr
    assert "one two three" in answer.stdout


def test_errors_are_one_line_and_exit_code_1(smi, smi_command):
    for key, said in ((None, "no API key"), ("sk-smi-wrong", "key")):
        env = {"OPENAI_API_KEY": key} if key else {}
        answer = smi_command("chat", "hello", "--home", str(smi.home), env=env)
        assert answer.returncode == 1
        assert said in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1
    unknown = smi_command(
        "chat", "hello", "--model", "nothing", "--home", str(smi.home), env={"OPENAI_API_KEY": smi.key}
    )
    assert "there are: " in unknown.stderr


def test_run_hands_in_a_job_and_prints_its_result(smi, smi_command):
    answer = smi_command(
        *("run", "converse", "--file", str(QUESTION), "--home", str(smi.home), "--json"),
        *("--request", '{"model": "echo"}'),
        env={"OPENAI_API_KEY": smi.key},
    )
    assert answer.returncode == 0, answer.stderr
    job = json.loads(answer.stdout)
    assert job["status"] == "succeeded"
    assert "capital of france" in job["result"]["transcript"].lower()
    assert "capital of france" in job["result"]["answer"]["text"].lower()


def test_run_refuses_what_is_no_request(smi, smi_command):
    for request, said in (
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"messages": [], "modle": "echo"}', "'modle' is not a parameter"),
    ):
        answer = smi_command(
            *("run", "chat", "--request", request, "--home", str(smi.home)), env={"OPENAI_API_KEY": smi.key}
        )
        assert answer.returncode == 1
        assert said in answer.stderr


def test_models_lists_the_catalogue_with_the_home_folders(smi, smi_command):
    listed = {
        entry["name"]: entry
        for entry in json.loads(smi_command("models", "--home", str(smi.home), "--json").stdout)
    }
    assert listed["echo-slow"]["options"] == {"tokens_per_second": 20}
    assert listed["whisper-tiny.en"]["aliases"] == ["whisper-1"]


def test_a_broken_catalogue_is_told_by_file_model_and_field(tmp_path, smi_command):
    (tmp_path / "models.toml").write_text('[mine]\ntask = "chat"\ndriver = "echo"\nslots = "many"\n')
    answer = smi_command("models", "--home", str(tmp_path))
    assert answer.returncode == 1
    assert "mine" in answer.stderr
    assert "slots" in answer.stderr
