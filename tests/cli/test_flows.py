"""`smi flows` and `smi models`: what there is to ask for."""

from __future__ import annotations

import json
import subprocess
import sys

from deployments.cli_flows import kind_of
from flows.registry import FLOWS
from tasks.protocol.shapes import CutoutParameters

LIGHT = """
import sys
from deployments.cli import main
sys.argv = ["smi", "flows"]
try:
    main()
except SystemExit as end:
    assert not end.code
print("HEAVY", sorted({"torch", "numpy", "PIL", "transformers", "fastapi"} & sys.modules.keys()))
"""


def test_a_flow_is_shown_with_what_it_takes_and_returns(smi_command):
    shown = smi_command("flows", "ask").stdout
    lines = [line.split() for line in shown.splitlines()]
    assert shown.startswith("ask: a question is answered from the documents of an index")
    assert ["question", "text", "required"] in lines
    assert ["top_k", "integer", "default", "4"] in lines
    assert "citations  list of {number, document, name, page, quote, score}" in shown
    assert "chat:" not in shown
    unknown = smi_command("flows", "sing")
    assert unknown.returncode == 1
    assert "there are: chat, transcribe" in unknown.stderr


def test_all_flows_are_shown_and_nothing_heavy_is_imported():
    shown = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True).stdout
    assert [name for name in FLOWS if f"\n{name}: " not in f"\n{shown}"] == []
    assert "HEAVY []" in shown


def test_scripts_get_schemas(smi_command):
    flows = json.loads(smi_command("flows", "--json").stdout)
    assert flows.keys() == FLOWS.keys()
    assert flows["ask"]["parameters"]["required"] == ["question", "index"]
    assert flows["cutout"]["returns"]["properties"]["picture"] == {"$ref": "#/$defs/Picture"}


def test_types_in_words():
    assert kind_of(CutoutParameters.model_fields["output_format"].annotation) == "png | webp"
    assert kind_of(list[str] | None) == "list of text"
    assert kind_of(dict[str, int]) == "names with integer"


def test_models_are_shown_in_columns(smi_command, tmp_path):
    name = "a-model-with-quite-a-long-name-of-its-own"
    (tmp_path / "models.toml").write_text(
        f'[{name}]\ntask = "chat"\ndriver = "openai"\nsource = "https://api.example.com/v1"\n'
    )
    headings, *lines = smi_command("models", "--home", str(tmp_path)).stdout.splitlines()
    names = ("model", "task", "driver", "tier", "memory", "licence", "aliases")
    at = [headings.index(heading) for heading in names]
    rows = [
        [line[begin:end].strip() for begin, end in zip(at, [*at[1:], None], strict=True)] for line in lines
    ]
    assert [name, "chat", "openai", "cloud", "-", "-", ""] in rows
    (whisper,) = [row for row in rows if row[0] == "whisper-tiny.en"]
    assert whisper == [
        "whisper-tiny.en",
        "transcription",
        "faster-whisper",
        "local",
        "400 MiB",
        "MIT",
        "whisper-1",
    ]
