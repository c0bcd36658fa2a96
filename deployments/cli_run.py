"""`smi run`: hand in a job or a pipeline, follow it and print what it returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli import Home, Json, Key, app, note, told
from deployments.cli_requests import base_url, key_of

if TYPE_CHECKING:
    from deployments.client import ApiClient
    from flows.definition import Pipeline

PIPELINES = (".yaml", ".yml", ".json")


@app.command()
def run(
    flow: Annotated[str, typer.Argument(help="A flow (chat, transcribe, ...) or a pipeline's file, x.yaml.")],
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A flow's file to send.")
    ] = None,
    request: Annotated[str | None, typer.Option(help="A flow's other fields, as a JSON object.")] = None,
    given: Annotated[
        list[str] | None, typer.Option("--input", help="A pipeline's input, NAME=VALUE or NAME=FILE.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the files that it makes.")
    ] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low")] = "normal",
    key: Key = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Submit a job or a pipeline, wait for it and print its result."""
    from deployments.client import ApiClient

    with told():
        is_pipeline = flow.endswith(PIPELINES)
        _refuse_others(flow, {"--file": file, "--request": request} if is_pipeline else {"--input": given})
        client = ApiClient(base_url(home), key_of(key))
        if is_pipeline:
            job = _hand_in(client, Path(flow), given or [], priority)
        else:
            job = _submit(client, flow, _fields(request or "{}"), file, priority)
        job = client.wait(job, note)
        if output is not None:
            for path in client.download(job, output):
                note(f"{path}")
        result = client.result(job)
    typer.echo(json.dumps(job | {"result": result}) if as_json else shown(result))


def shown(result: Any) -> str:
    """A result for people."""
    return json.dumps(result, indent=2, ensure_ascii=False)


def _refuse_others(flow: str, options: dict[str, Any]) -> None:
    """Refuse options that would say nothing to this flow or pipeline."""
    from blocks.errors import InvalidRequest

    for option, value in options.items():
        if value:
            kind = "flow; use --file and --request" if option == "--input" else "pipeline; use --input"
            raise InvalidRequest(f"{option} is not taken with {flow}, which is a {kind}")


def _submit(client: ApiClient, flow: str, fields: dict[str, Any], file: Path | None, priority: str) -> Any:
    from blocks.errors import InvalidRequest

    try:
        return client.submit(flow, fields, file, priority, None)
    except InvalidRequest as error:
        if error.param == "file" and file is None:
            raise InvalidRequest(f"flow {flow!r} works on a file: give it with --file PATH") from None
        raise


def _fields(text: str) -> dict[str, Any]:
    from blocks.errors import InvalidRequest

    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f'--request must be an object, {{"model": "..."}}, not {text}')
    return value


def _hand_in(client: ApiClient, path: Path, given: list[str], priority: str) -> Any:
    """The pipeline in `path` with its inputs, as a job."""
    from blocks.errors import InvalidRequest

    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not text in UTF-8") from None
    values, files = _inputs(_pipeline(text, path), given)
    return client.submit_pipeline(text, values, files, priority)


def _pipeline(text: str, path: Path) -> Pipeline:
    from pydantic import ValidationError

    from blocks.errors import InvalidRequest
    from blocks.validation import told as in_words
    from blocks.yaml import read_yaml
    from flows.definition import Pipeline

    asked = read_yaml(text, str(path))
    if not isinstance(asked, dict):
        raise InvalidRequest(f"{path} is no pipeline; write name, inputs and steps")
    try:
        return Pipeline.model_validate(asked)
    except ValidationError as error:
        raise in_words(error, model=Pipeline) from None


def _inputs(pipeline: Pipeline, given: list[str]) -> tuple[dict[str, str], dict[str, Path]]:
    """Values and files by name, as `--input` gives them."""
    from blocks.errors import InvalidRequest
    from flows.definition import FILES

    values: dict[str, str] = {}
    files: dict[str, Path] = {}
    there = ", ".join(f"{name} ({asked.type})" for name, asked in pipeline.inputs.items()) or "none"
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--input {pair!r} is no NAME=VALUE; this pipeline's inputs: {there}")
        if name not in pipeline.inputs:
            raise InvalidRequest(f"--input {name!r} is no input of this pipeline; there are: {there}")
        if name in values or name in files:
            raise InvalidRequest(f"--input {name} is given twice")
        if pipeline.inputs[name].type not in FILES:
            values[name] = value
        elif Path(value).is_file():
            files[name] = Path(value)
        else:
            raise InvalidRequest(f"--input {name}: there is no file {value}")
    missing = [
        name
        for name, asked in pipeline.inputs.items()
        if asked.default is None and name not in values and name not in files
    ]
    if missing:
        raise InvalidRequest(f"--input {missing[0]}=... is missing; this pipeline's inputs: {there}")
    return values, files
