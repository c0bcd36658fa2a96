"""Settings name the key, the value and the cure."""

import json
from pathlib import Path

import pytest

from blocks.errors import ConfigurationError
from blocks.settings import load_settings


def test_environment_wins_over_the_home_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"api_port": 1234, "join_token": "from-file"}))
    monkeypatch.setenv("SMI_HOME", str(tmp_path))
    monkeypatch.setenv("SMI_API_PORT", "4321")
    monkeypatch.delenv("SMI_JOIN_TOKEN", raising=False)
    settings = load_settings()
    assert settings.api_port == 4321
    assert settings.require("join_token") == "from-file"


def test_options_win_over_everything_and_none_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMI_API_PORT", "4321")
    settings = load_settings(home=tmp_path, api_port=5555, host=None)
    assert (settings.home, settings.api_port, settings.host) == (tmp_path, 5555, "127.0.0.1")


def test_a_wrong_value_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMI_API_PORT", "70000")
    with pytest.raises(ConfigurationError, match=r"api_port.*SMI_API_PORT.*65535"):
        load_settings(home=tmp_path)


def test_a_missing_value_says_how_to_set_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMI_JOIN_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match=r"SMI_JOIN_TOKEN.*smi up"):
        load_settings(home=tmp_path).require("join_token")


def test_a_broken_home_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"settings\.json is not JSON"):
        load_settings(home=tmp_path)


def test_secrets_do_not_show_when_printed(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path, join_token="hush", database_url="postgresql://u:hush@h/d")
    assert "hush" not in repr(settings)
