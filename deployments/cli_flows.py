"""`smi flows`: what jobs and steps of pipelines may name, what each takes and what it returns."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from deployments.cli import Json, app, columns, told

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from flows.entry import Entry

WORDS = {str: "text", int: "integer", float: "number", bool: "boolean"}
MODEL = "name or alias in the catalogue; default: the first of its kind"


@app.command()
def flows(
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    as_json: Json = False,
) -> None:
    """List the flows that jobs and steps of pipelines may name: parameters and results."""
    from flows.registry import FLOWS, flow_named

    with told():
        chosen = FLOWS if name is None else {name: flow_named(name)}
    if as_json:
        typer.echo(json.dumps({name: _schema(entry) for name, entry in chosen.items()}))
        return
    for name, entry in chosen.items():
        typer.echo(f"{name}: {_description(entry)}\n{_parameters(entry)}  returns\n{_results(entry)}")
    typer.echo("A step of a pipeline names `model` beside `task`; the others are its `parameters`.")


def _schema(entry: Entry) -> dict[str, Any]:
    return {
        "description": _description(entry),
        "parameters": entry.request.model_json_schema(),
        "returns": entry.result.model_json_schema(),
    }


def _description(entry: Entry) -> str:
    """The first sentence of the file that tells the flow."""
    doc = sys.modules[entry.flow.fn.__module__].__doc__ or ""
    return " ".join(doc.partition("\n\n")[0].split()).partition(": ")[2]


def _parameters(entry: Entry) -> str:
    fields = entry.request.model_fields
    return _indented(
        (name, kind_of(f.annotation), _default(f), _meaning(name, f)) for name, f in fields.items()
    )


def _results(entry: Entry) -> str:
    fields = entry.result.model_fields
    return _indented((name, kind_of(f.annotation), f.description or "") for name, f in fields.items())


def _indented(rows: Any) -> str:
    return "".join(f"    {line}\n" for line in columns(*rows))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value in (None, "") or field.default_factory is not None:
        return "-"
    return f"default {value if isinstance(value, str) else json.dumps(value)}"


def _meaning(name: str, field: FieldInfo) -> str:
    return field.description or (MODEL if name == "model" or name.endswith("_model") else "")


def kind_of(annotation: Any) -> str:
    """A type in words: `integer`, `png | webp`, `list of {role, content}`, `recording`."""
    from pydantic import BaseModel

    from blocks.storage import Media
    from blocks.validation import plain

    kind = plain(annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return f"names with {kind_of(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, Media):
        return kind.__name__.lower()
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"{{{', '.join(kind.model_fields)}}}"
    return WORDS.get(kind, "any value")
