"""What pydantic says of a value, as an error for the user: by the parameter's path, without its content."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from blocks.errors import InvalidRequest, UnknownParameter

MAX_NAME = 64
ALIKE = 0.65  # of 1: how much of a name must agree with another to be taken for it, misspelt


def told(error: ValidationError, at: str = "", model: type[BaseModel] | None = None) -> InvalidRequest:
    """What is wrong first of all: a name that does not exist, which also explains what is missing.

    Args:
        at: the path of what was validated, such as `steps.answer`.
        model: what it was to be, for hints at what is right.
    """
    details = error.errors(include_input=False, include_url=False)
    return in_words(min(details, key=lambda detail: detail["type"] != "extra_forbidden"), at, model)


def in_words(detail: ErrorDetails, at: str = "", model: type[BaseModel] | None = None) -> InvalidRequest:
    """One finding as an error. `at` and `model` as in `told`."""
    if detail["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {detail['ctx']['error']}")
    param = path(detail["loc"], at)
    if not param:
        return InvalidRequest("the body must be a JSON object")
    match detail["type"]:
        case "extra_forbidden":
            *way, name = detail["loc"]
            hint = nearest(str(name), _fields(_kind_at(model, way))) or "leave it out"
            return UnknownParameter(f"{param!r} is not a parameter here; {hint}", param=param)
        case "missing":
            cure = "; GET /v1/models lists what there is" if param == "model" else ""
            return InvalidRequest(f"{param!r} is missing{cure}", param=param)
        case "list_type" if fields := _fields(_kind_at(model, [*detail["loc"], 0])):
            wanted = f"should be a list of objects: {', '.join(fields)}"
            return InvalidRequest(f"{param!r} is wrong: {wanted}", param=param)
    return InvalidRequest(f"{param!r} is wrong: {said(detail)}", param=param)


def nearest(name: str, there: Collection[str]) -> str:
    """A question after the one of `there` that `name` may have been meant to be; empty if none is alike."""
    alike = difflib.get_close_matches(name, there, 1, ALIKE) if len(name) <= MAX_NAME else []
    return f"did you mean {alike[0]!r}?" if alike else ""


def plain(kind: Any) -> Any:
    """An annotated type without annotations, and of several alternatives the first that is not None."""
    while True:
        origin: Any = get_origin(kind)
        if origin is Annotated:
            kind = get_args(kind)[0]
        elif origin in (Union, UnionType):
            kind = next(member for member in get_args(kind) if member is not NoneType)
        else:
            return kind


def _kind_at(kind: Any, way: list[int | str]) -> Any:
    """What lies at `way` within a value of `kind`; None if that cannot be said."""
    for part in way:
        if get_origin(kind) in (list, dict):
            kind = plain(get_args(kind)[-1])
        elif part in (fields := _fields(kind)):
            kind = plain(fields[part].annotation)
        else:
            return None
    return kind


def _fields(kind: Any) -> dict[Any, Any]:
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def said(detail: ErrorDetails) -> str:
    """Pydantic's own words, to go on a sentence with."""
    words = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{words[0].lower()}{words[1:]}"


def path(location: tuple[int | str, ...], at: str = "") -> str:
    """A location as one writes it: `messages[0].role`."""
    text = at
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{shortened(part)}" if text else shortened(part)
    return text


def quoted(value: str) -> str:
    """A value that should be a name, in quotes. One that is none is told by its length: it may be anything,
    such as what a pipeline's step has written, and errors are recorded."""
    if re.fullmatch(r"[A-Za-z0-9._:/@-]{0,64}", value):
        return repr(value)
    return f"(a text of {len(value)} characters)"


def shortened(name: str) -> str:
    """A name of the client's own, as long as an error may quote it."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
