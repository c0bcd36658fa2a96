"""References inside a step's parameters.

`$step.path[0].field` as a whole text stands for the value itself, `${step.path}` inside longer text for
the value as text, `$$` for a dollar. `$inputs.name` is an input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pydantic_core import to_json

from blocks.errors import InvalidRequest
from blocks.validation import path

NAME = r"[a-z][a-z0-9_-]{0,62}"
_PATH = r"(?:\.[A-Za-z_][\w-]*|\[\d{1,6}\])*"
_WHOLE = re.compile(rf"\$({NAME})({_PATH})", re.ASCII)
_DOLLAR = re.compile(rf"\$\$|\$\{{({NAME})({_PATH})\}}|\$", re.ASCII)
_PART = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

MAX_FILLED_IN = 4_000_000

Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """`source` is a step's name or "inputs"; `path` leads into its value. `text`: as it is written."""

    text: str
    source: str
    path: Location
    in_text: bool

    @classmethod
    def found(cls, match: re.Match[str], in_text: bool) -> Reference:
        parts = (name or int(index) for name, index in _PART.findall(match[2]))
        return cls(match[0], match[1], tuple(parts), in_text)


class Allowance:
    """How much references may put into a request: each may stand for much, and be written in few letters."""

    def __init__(self) -> None:
        self._left = MAX_FILLED_IN

    def take(self, value: Any, reference: Reference, param: str) -> Any:
        """`value`, which `reference` puts into `param`. Raises `InvalidRequest` if it is too much."""
        self._left -= len(value) if isinstance(value, str) else len(to_json(value))
        if self._left < 0:
            raise InvalidRequest(
                f"{param!r} refers to {reference.text}, with which references stand for more than "
                f"{MAX_FILLED_IN} characters; refer to less",
                param=param,
            )
        return value


Give = Callable[[Reference, Location], Any]


def resolved(value: Any, give: Give, at: str, location: Location = ()) -> Any:
    """`value`, made of JSON's types, with what `give` says in the place of each reference.

    Args:
        give: what a reference stands for; inside text it becomes text, as JSON writes it.
        at: the path of `value`, for errors; `location` is where in it we are.

    Raises:
        InvalidRequest: a `$` that is neither a reference nor doubled.
    """
    if isinstance(value, str):
        return _text(value, give, at, location) if "$" in value else value
    if isinstance(value, list):
        return [resolved(item, give, at, (*location, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: resolved(item, give, at, (*location, name)) for name, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        param = path(location, at)
        raise InvalidRequest(f"{param!r} is wrong: {value} is no number in JSON", param=param)
    return value


def _text(text: str, give: Give, at: str, location: Location) -> Any:
    if whole := _WHOLE.fullmatch(text):
        return give(Reference.found(whole, in_text=False), location)

    def piece(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[1]:
            value = give(Reference.found(match, in_text=True), location)
            return value if isinstance(value, str) else to_json(value).decode()
        param = path(location, at)
        raise InvalidRequest(
            f"{param!r} has a `$` that begins no reference; write $step.field as the whole text, "
            "${step.field} inside longer text, and $$ for a dollar",
            param=param,
        )

    return _DOLLAR.sub(piece, text)
