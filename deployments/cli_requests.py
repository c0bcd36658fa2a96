"""Commands of `smi` that ask: chat, models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli import Home, Json, Key, app, home_of, settings_of, table, told


def base_url(home: Path | None) -> str:
    """The API's URL, ending in /v1: OPENAI_BASE_URL, or this machine's installation."""
    given = os.environ.get("OPENAI_BASE_URL")
    if given:
        return given.rstrip("/")
    settings = settings_of(home)
    return f"http://{settings.host}:{settings.api_port}/v1"


def key_of(key: str | None) -> str:
    """The API key. Raises `ConfigurationError` if none is given."""
    from blocks.errors import ConfigurationError

    if not key:
        raise ConfigurationError(
            "no API key: give --key or set OPENAI_API_KEY; "
            "`smi up` shows it once, `smi up --new-key` makes another"
        )
    return key


@app.command()
def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="Name or alias in the catalogue.")] = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="The answer is cut after so many.")] = 512,
    key: Key = None,
    home: Home = None,
) -> None:
    """Ask a model one question; the answer appears as it is made."""
    with told():
        _chat(base_url(home), key_of(key), question, model, max_tokens)


def _chat(url: str, key: str, question: str, model: str, max_tokens: int) -> None:
    import openai

    from blocks.errors import SmiError

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    try:
        with client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            max_tokens=max_tokens,
        ) as stream:
            for chunk in stream:
                if chunk.choices:
                    typer.echo(chunk.choices[0].delta.content or "", nl=False)
        typer.echo()
    except openai.APIConnectionError as error:
        raise SmiError(f"{url} does not answer ({error.__cause__}): is `smi up` running?") from None
    except openai.APIError as error:
        raise SmiError(error.message) from None


def _models_table(home: Path | None) -> list[dict[str, Any]]:
    from blocks.catalogue import load_catalogue

    return [entry.model_dump(mode="json") for entry in load_catalogue(home_of(home))]


@app.command()
def models(home: Home = None, as_json: Json = False) -> None:
    """List the catalogue: models that ship and those of the home folder's models.toml."""
    with told():
        entries = _models_table(home)
    if as_json:
        typer.echo(json.dumps(entries))
        return
    rows = []
    for entry in entries:
        memory = f"{entry['memory'] / 2**20:.0f} MiB" if entry["memory"] else "-"
        aliases = ", ".join(entry["aliases"])
        names = (entry["name"], entry["task"], entry["driver"], entry["tier"])
        rows.append((*names, memory, entry["licence"] or "-", aliases))
    table(("model", "task", "driver", "tier", "memory", "licence", "aliases"), *rows)
