"""What pydantic says of a value, as an error for the user: by the parameter's path, without its content."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from blocks.errors import InvalidRequest, UnknownParameter

MAX_NAME = 64


def told(error: ValidationError, at: str = "") -> InvalidRequest:
    """What is wrong first of all: a name that does not exist, which also explains what is missing.

    Args:
        at: the path of what was validated, such as `steps.answer`.
    """
    details = error.errors(include_input=False, include_url=False)
    return in_words(min(details, key=lambda detail: detail["type"] != "extra_forbidden"), at)


def in_words(detail: ErrorDetails, at: str = "") -> InvalidRequest:
    """One finding as an error."""
    if detail["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {detail['ctx']['error']}")
    param = path(detail["loc"], at)
    if not param:
        return InvalidRequest("the body must be a JSON object")
    match detail["type"]:
        case "extra_forbidden":
            return UnknownParameter(f"{param!r} is not a parameter here; leave it out", param=param)
        case "missing":
            cure = "; GET /v1/models lists what there is" if param == "model" else ""
            return InvalidRequest(f"{param!r} is missing{cure}", param=param)
    return InvalidRequest(f"{param!r} is wrong: {said(detail)}", param=param)


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


def shortened(name: str) -> str:
    """A name of the client's own, as long as an error may quote it."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
