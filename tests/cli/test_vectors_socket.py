"""Where `smi up` has the vectors service listen."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from blocks.settings import load_settings
from deployments.up import home as homes


def settled(home: Path) -> str:
    homes.prepare(home)
    return homes.settled(home, {"api_port": 0, "node_port": 0, "prefect_port": 0}).vectors


def test_it_is_in_the_home_folder(folder: Path) -> None:
    home = folder / "short"
    assert settled(home) == f"unix:{home}/vectors/service.sock"
    assert load_settings(home=home).vectors == f"unix:{home}/vectors/service.sock"
    moved = home.rename(folder / "moved")
    assert settled(moved) == f"unix:{moved}/vectors/service.sock"


def test_the_path_of_a_socket_is_short_and_its_folder_private(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    home = folder / ("long" * 25)
    first = settled(home)
    socket = Path(first.removeprefix("unix:"))
    assert len(str(socket)) < 107
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert settled(home) == first
    socket.parent.chmod(0o755)  # not private any more: another one
    assert settled(home) != first


def test_a_url_of_ones_own_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_VECTORS_URL", "127.0.0.1:9000")
    assert settled(folder / "own") == "127.0.0.1:9000"
    assert json.loads((folder / "own" / "settings.json").read_text())["vectors_url"] == "127.0.0.1:9000"
