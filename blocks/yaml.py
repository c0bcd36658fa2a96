"""YAML and JSON that people write, read strictly."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent

from blocks.errors import InvalidRequest

MAX_TEXT = 256 * 1024


def read_yaml(text: str, what: str) -> Any:
    """The one document that `text` is: YAML 1.2, and so JSON as well.

    Keys that stand twice are refused, and aliases (`*name`), which can make much out of little. Takes
    about 0.1 s for 10 kB.

    Args:
        what: a name for it in errors, such as `pipeline`.

    Raises:
        InvalidRequest: with the line at fault.
    """
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{what} may have at most {MAX_TEXT} characters, not {len(text)}", param=what)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if isinstance(event, AliasEvent):
                line = event.start_mark.line + 1
                raise InvalidRequest(f"{what}, line {line}: aliases (*name) are not taken here", param=what)
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidRequest(f"{what}{where}: {_problem(error)}", param=what) from None
    except (YAMLError, ValueError) as error:
        raise InvalidRequest(f"{what} is not YAML ({type(error).__name__})", param=what) from None
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply", param=what) from None


def _problem(error: MarkedYAMLError) -> str:
    """What is wrong, on one line."""
    lines = str(error.problem or error.context or "").strip().splitlines() or ["is not YAML"]
    return lines[0].partition(" with value ")[0]
