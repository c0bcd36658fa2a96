"""A flow's request out of a client's values, with what is wrong told by name and without content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from blocks.catalogue import Catalogue
from blocks.errors import InvalidRequest, SmiError, UnknownParameter
from flows.registry import Entry

M = TypeVar("M", bound=BaseModel)


def parsed(model: type[M], values: Any) -> M:
    """`values` as a `model`.

    Raises:
        UnknownParameter, InvalidRequest: naming the parameter by its path, never its value.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise refusal(error) from None


def refusal(error: ValidationError) -> SmiError:
    """The first fault of `error`. Pydantic's own text shows the values, so it is not used."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return UnknownParameter(f"parameter {path!r} does not exist here", param=path)
    if first["type"] == "missing":
        return InvalidRequest(f"parameter {path!r} is missing", param=path)
    said = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"parameter {path!r}: {said[:1].lower()}{said[1:]}", param=path or None)


def check_models(entry: Entry, request: BaseModel, catalogue: Catalogue) -> str:
    """Check that the models a request names exist; the name of the model of the flow's heaviest step.

    Raises:
        ModelNotFound: with the names that would be right.
    """
    named: Mapping[str, str] = {"model": entry.task, "transcription_model": "transcription"}
    heaviest = catalogue.default(entry.task).name
    for field, task in named.items():
        name = getattr(request, field, "")
        if name:
            found = catalogue.get(name, task).name
            heaviest = found if field == "model" else heaviest
    return heaviest
