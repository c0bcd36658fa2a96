"""Check a step's parameters while results are not known yet.

Each reference is replaced by a sample of what it will stand for (an input by its value, which is known),
and the request is validated as a whole: so pydantic itself names the parameter at fault.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from blocks.errors import InvalidRequest
from blocks.storage import Media
from blocks.validation import in_words, path, said
from flows.kinds import Kind, NoSuchPart, described, is_scalar, media_in, part_of, sample
from flows.references import Allowance, Location, Reference

INPUTS = "inputs"  # what references call the pipeline's own inputs
# What a sample may break and the true value keep: that is judged when the step begins.
_RANGE = {
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "string_pattern_mismatch",
    "string_too_long",
    "string_too_short",
    "too_long",
    "too_short",
}

Known = Mapping[tuple[str | None, str | None], type[Media]]


class Check:
    """Of one step. `give` fills in samples, `refuse` judges the request that they make.

    Args:
        at: the path of the step's parameters.
        inputs: values by name; `kinds`: what they are.
        results: the models of the other steps' results.
        allowance: what the references of all steps may put in together.
    """

    def __init__(
        self,
        at: str,
        inputs: Mapping[str, Any],
        kinds: Mapping[str, Kind],
        results: Mapping[str, type[BaseModel]],
        allowance: Allowance,
    ) -> None:
        self._at, self._inputs, self._kinds, self._results = at, inputs, kinds, results
        self._allowance = allowance
        self._given: dict[Location, tuple[Reference, Kind]] = {}
        self._media: dict[tuple[str | None, str | None], type[Media]] = {}

    def give(self, reference: Reference, location: Location) -> Any:
        """A sample for `reference`. Raises `InvalidRequest` if it leads to nothing, or is too much."""
        return self._allowance.take(self._sample(reference, location), reference, path(location, self._at))

    def _sample(self, reference: Reference, location: Location) -> Any:
        kind = self._kind(reference, location)
        if reference.in_text and not is_scalar(kind):
            raise self._wrong(location, reference, kind, "only texts and numbers can stand inside text")
        if reference.source != INPUTS or location not in self._given:
            self._given[location] = reference, kind
        if reference.source == INPUTS and is_scalar(kind):
            return self._inputs[str(reference.path[0])]
        try:
            return sample(kind, self._sample_file)
        except NoSuchPart as error:
            raise self._said(location, f"refers to {reference.text}: {error}") from None

    def _kind(self, reference: Reference, location: Location) -> Kind:
        if reference.source == INPUTS:
            kind, way = self._kinds[str(reference.path[0])], reference.path[1:]
        else:
            kind, way = self._results[reference.source], reference.path
        try:
            return part_of(kind, way)
        except NoSuchPart as error:
            raise self._said(location, f"refers to {reference.text}: {error}") from None

    def _sample_file(self, kind: type[Media]) -> str:
        name = f"sample-{secrets.token_hex(8)}"  # no client can name it
        self._media[name, None] = kind
        return name

    def refuse(self, model: type[BaseModel], values: Mapping[str, Any]) -> None:
        """Raise `InvalidRequest` for what `model` would refuse whatever the references will stand for."""
        try:
            request = model.model_validate_json(to_json(values), strict=True)
        except ValidationError as error:
            details = error.errors(include_input=False, include_url=False)
            findings = [detail for detail in details if not self._left_open(detail)]
            if findings:
                worst = min(findings, key=lambda detail: detail["type"] != "extra_forbidden")
                raise self._finding(worst, model) from None
        else:
            refuse_foreign(request, self._media, self._at)

    def _origin(self, location: Location) -> tuple[Location, Reference, Kind] | None:
        """The reference that put a value where `location` is."""
        for length in range(len(location) + 1):
            if found := self._given.get(at := location[:length]):
                return at, *found
        return None

    def _left_open(self, detail: ErrorDetails) -> bool:
        origin = self._origin(detail["loc"])
        if origin is None or origin[1].source == INPUTS:
            return False
        rule = detail["type"] in ("literal_error", "value_error") and is_scalar(origin[2])
        return rule or detail["type"] in _RANGE

    def _finding(self, detail: ErrorDetails, model: type[BaseModel]) -> InvalidRequest:
        origin = self._origin(detail["loc"])
        if origin is None:
            return in_words(detail, self._at, model)
        at, reference, kind = origin
        inside = detail["loc"] != at
        return self._wrong(at, reference, kind, "it does not fit here" if inside else said(detail))

    def _wrong(self, location: Location, reference: Reference, kind: Kind, problem: str) -> InvalidRequest:
        return self._said(location, f"is wrong: {reference.text} is {described(kind)}; {problem}")

    def _said(self, location: Location, problem: str) -> InvalidRequest:
        param = path(location, self._at)
        return InvalidRequest(f"{param!r} {problem}", param=param)


def refuse_foreign(request: BaseModel, known: Known, at: str) -> None:
    """Refuse files that a request names itself, and those of another kind than is needed.

    Args:
        known: the inputs and results of steps, by reference and path.
    """
    for location, media in media_in(request):
        kind = known.get((media.reference, media.path))
        param = path(location, at)
        if kind is None:
            raise InvalidRequest(
                f"{param!r} names a file itself, or none; refer to an input ($inputs.name) or to a step's "
                "result",
                param=param,
            )
        if not issubclass(kind, type(media)):
            needed = described(type(media))
            raise InvalidRequest(
                f"{param!r} is wrong: it refers to {described(kind)}, and {needed} is needed", param=param
            )
