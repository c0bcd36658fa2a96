"""The catalogue: names, aliases, and errors that say what would be right."""

from pathlib import Path

import pytest

from blocks.catalogue import load_catalogue
from blocks.errors import ConfigurationError, ModelNotFound


def test_ships_a_model_for_each_task_of_the_demo(tmp_path: Path) -> None:
    catalogue = load_catalogue(tmp_path)
    assert catalogue.default("chat").name == "smollm2-135m"
    assert catalogue.get("whisper-1", "transcription").name == "whisper-tiny.en"
    assert all(model.licence and model.memory for model in catalogue)


def test_the_home_file_adds_models_and_overrides_single_fields(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[echo]\nslots = 3\n[qwen]\ntask = "chat"\ndriver = "openai"\nsource = "http://127.0.0.1:11434/v1"\n'
    )
    catalogue = load_catalogue(tmp_path)
    assert (catalogue.get("echo").slots, catalogue.get("echo").driver) == (3, "echo")
    assert catalogue.get("qwen", "chat").driver == "openai"


def test_an_unknown_model_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'gpt-9' does not exist; there are: .*echo"):
        load_catalogue(tmp_path).get("gpt-9", "chat")


def test_a_model_of_another_task_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'echo' is for chat, not transcription"):
        load_catalogue(tmp_path).get("echo", "transcription")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[m]\ntask = 'chat'\n", r"model 'm'.*driver"),
        ("[m]\ntask='chat'\ndriver='echo'\nmemmory=1\n", r"memmory"),
        ("[m]\ntask='chart'\ndriver='echo'\n", r"model 'm': task 'chart' is not installed; there are: chat"),
        ("[m]\ntask='chat'\ndriver='ehco'\n", r"model 'm': driver 'ehco' is not installed; there are: echo"),
        ("slots = 3\n", r"slots = 3 is not a model"),
        ("[m\n", r"is not TOML"),
    ],
)
def test_a_broken_home_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=f"(?s){told}"):
        load_catalogue(tmp_path)


def test_openais_names_lead_to_models_that_ship(tmp_path: Path) -> None:
    catalogue = load_catalogue(tmp_path)
    assert catalogue.get("gpt-4o-mini", "chat").name == "smollm2-135m"
    assert catalogue.get("whisper-1", "transcription").name == "whisper-tiny.en"


MINE = "[mine]\ntask = 'chat'\ndriver = 'echo'\n"


@pytest.mark.parametrize("text", [f"{MINE}aliases = ['gpt-4o-mini']\n", MINE.replace("mine", "gpt-4o-mini")])
def test_a_name_that_the_home_file_gives_away_moves(tmp_path: Path, text: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    catalogue = load_catalogue(tmp_path)
    assert catalogue.get("gpt-4o-mini").driver == "echo"
    assert catalogue.get("default").name == "smollm2-135m"
    assert "gpt-4o-mini" not in catalogue.get("default").aliases


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{MINE}aliases = ['a']\n{MINE.replace('mine', 'other')}aliases = ['a']\n",
            r"models 'mine' and 'other' both have the alias 'a'",
        ),
        (f"{MINE}aliases = ['echo']\n", r"alias 'echo' of model 'mine' is another model's name"),
        (f"{MINE}aliases = 'a'\n", r"model 'mine'.*aliases"),
        (f"{MINE}aliases = [1]\n", r"model 'mine'.*aliases"),
    ],
)
def test_a_name_means_one_model(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=f"(?s){told}"):
        load_catalogue(tmp_path)
