"""The README's examples, run as they stand: what a new user types must work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from blocks.catalogue import Model, load_catalogue
from deployments.node.adapters.chat import ChatAdapter
from deployments.node.plugins import driver_class
from tasks.protocol.shapes import ChatParameters, ChatResult, Message

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "examples"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
SHELL = [text for language, text in BLOCKS if language == "sh"]
PYTHON = [text for language, text in BLOCKS if language == "python"]
(PIPELINE,) = (text for language, text in BLOCKS if language == "yaml")
(CATALOGUE,) = (text for language, text in BLOCKS if language == "toml")


@pytest.fixture
def shell(smi: Any, tmp_path: Path) -> Any:
    """Runs a script as a user does who has followed the README so far; what it wrote is in `tmp_path`."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    ours = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SMI_HOME": str(smi.home),
        "OPENAI_BASE_URL": f"{smi.url}/v1",
        "OPENAI_API_KEY": smi.key,
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=tmp_path, env=ours, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    return run


def test_there_are_the_examples() -> None:
    assert (len(SHELL), len(PYTHON)) == (3, 3)


def test_curl(shell: Any, tmp_path: Path) -> None:
    said = shell("bash", "-euo", "pipefail", "-c", SHELL[0]).stdout
    assert "data: [DONE]" in said
    assert "sea is large" in said.lower()
    made = ("vectors.json", "sea.mp3", "cutout.png", "larger.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in made)


def test_documents(shell: Any) -> None:
    said = shell("bash", "-euo", "pipefail", "-c", SHELL[1]).stdout
    assert '"name":"printing.md"' in said.replace(": ", ":").replace("\n", "")
    assert '"abstained":false' in said.replace(": ", ":")


def test_the_pipeline(shell: Any, tmp_path: Path) -> None:
    assert (EXAMPLES / "spoken-question.yaml").read_text() == PIPELINE
    shell("bash", "-euo", "pipefail", "-c", SHELL[2])
    names = sorted(
        str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*.*")
    )
    assert names == ["cut/cutout.png", "enlarge/upscaled.png", "speak/speech.wav"]


def test_python(shell: Any) -> None:
    assert len(shell(sys.executable, "-c", PYTHON[0]).stdout.split()) > 3


def test_the_flow_of_ones_own_is_the_one_that_is_run() -> None:
    assert PYTHON[1] == (EXAMPLES / "minutes.py").read_text()


async def test_the_driver_of_ones_own() -> None:
    assert PYTHON[2] == (EXAMPLES / "driver.py").read_text()
    made: dict[str, Any] = {}
    exec(PYTHON[2], made)
    driver = made["ShoutDriver"](Model(name="shout", task="chat", driver="shout"))
    driver.load()
    asked = ChatParameters(messages=[Message(role="user", content="the sea is large")])
    done = await ChatAdapter(driver).run(asked, nothing(), None)
    assert ChatResult.model_validate_json(done.result).text.strip() == "THE SEA IS LARGE"
    stopped = threading.Event()
    stopped.set()
    assert len(list(driver.run(asked, stopped))) == 1


async def nothing() -> Any:
    for chunk in ():
        yield chunk


def test_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(CATALOGUE)
    catalogue = load_catalogue(tmp_path)
    assert catalogue.get("gpt-4o-mini").name == "qwen2.5-7b"
    assert catalogue.get("gpt-5-mini").tier == "cloud"
    assert all(driver_class(model.driver) for model in catalogue)
