"""Which files a run without a key may have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blocks.errors import InvalidRequest, PermissionDenied, SmiError
from deployments.jobs.requests import parsed
from deployments.node.local_files import refuse_files
from flows.pipeline import PipelineRequest
from flows.transcribe import TranscribeRequest


def transcription(file: dict[str, Any]) -> TranscribeRequest:
    return parsed(TranscribeRequest, {"file": file})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "out").symlink_to("/etc")
    return tmp_path / "given"


def test_what_is_allowed(folder: Path) -> None:
    refuse_files(transcription({"path": f"{folder}/q.wav"}), folder)
    refuse_files(transcription({"path": f"{folder}/a/../q.wav"}), folder)
    refuse_files(transcription({"reference": "inbox/q.wav"}), None)


@pytest.mark.parametrize(
    ("file", "kind", "said"),
    [
        ({"path": "/etc/passwd"}, PermissionDenied, "'file' is refused: .* are those below "),
        ({"path": "FOLDER/../q.wav"}, PermissionDenied, "those below "),
        ({"path": "FOLDER/out/passwd"}, PermissionDenied, "those below "),
        ({"path": "FOLDER-2/q.wav"}, PermissionDenied, "those below "),
        ({"reference": "jobs/job_1/inputs/file"}, PermissionDenied, "below 'inbox/' of the storage only"),
        ({"reference": "runs/1/files/a.wav"}, PermissionDenied, "below 'inbox/' of the storage only"),
        ({"name": "q.wav"}, InvalidRequest, "'file' names no file"),
        ({}, InvalidRequest, "'file' names no file"),
    ],
)
def test_what_is_refused(folder: Path, file: dict[str, Any], kind: type[SmiError], said: str) -> None:
    asked = {name: value.replace("FOLDER", str(folder)) for name, value in file.items()}
    with pytest.raises(kind, match=said) as refused:
        refuse_files(transcription(asked), folder)
    assert refused.value.param == "file"


def test_without_the_setting_no_local_file_is_read_also_not_by_a_pipeline(folder: Path) -> None:
    with pytest.raises(PermissionDenied, match="SMI_LOCAL_FILES names no folder"):
        refuse_files(transcription({"path": f"{folder}/q.wav"}), None)
    pipeline = {
        "name": "a",
        "inputs": {"q": {"type": "recording"}},
        "steps": {"hear": {"task": "transcribe", "parameters": {"file": "$inputs.q"}}},
    }
    asked = parsed(PipelineRequest, {"pipeline": pipeline, "inputs": {"q": {"path": "/etc/passwd"}}})
    with pytest.raises(PermissionDenied, match=r"'inputs\.q' is refused"):
        refuse_files(asked, None)
