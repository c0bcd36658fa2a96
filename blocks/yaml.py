"""YAML and JSON that people write, read strictly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
)

from blocks.errors import InvalidRequest, storable

MAX_TEXT = 128 * 1024
MAX_DEPTH = 40


def read_yaml(text: str, what: str) -> Any:
    """The one document that `text` is: YAML 1.2, and so JSON as well.

    Keys that stand twice are refused, tags (`!name`), and aliases (`*name`), which can make much out of
    little. Takes about 0.1 s for 10 kB.

    Args:
        what: a name for it in errors, such as `pipeline`.

    Raises:
        InvalidRequest: with the line at fault.
    """
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{what} may have at most {MAX_TEXT} characters, not {len(text)}", param=what)
    try:
        _check(YAML(typ="safe", pure=True).parse(text), what)
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidRequest(f"{what}{where}: {_problem(error)}", param=what) from None
    except (YAMLError, ValueError) as error:
        raise InvalidRequest(f"{what} is not YAML ({type(error).__name__})", param=what) from None


def _check(events: Iterable[Event], what: str) -> None:
    depth = 0
    for event in events:
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        problem = ""
        if depth > MAX_DEPTH:
            problem = "nested too deeply"
        elif isinstance(event, NodeEvent) and getattr(event, "tag", None):
            problem = "tags (!name) are not taken here"
        elif isinstance(event, AliasEvent):
            problem = "aliases (*name) are not taken here"
        elif isinstance(event, ScalarEvent) and storable(event.value) != event.value:
            problem = "an unpaired surrogate or NUL"
        if problem:
            raise InvalidRequest(f"{what}, line {event.start_mark.line + 1}: {problem}", param=what)


def _problem(error: MarkedYAMLError) -> str:
    """What is wrong, on one line."""
    lines = str(error.problem or error.context or "").strip().splitlines() or ["is not YAML"]
    return lines[0].partition(" with value ")[0]
