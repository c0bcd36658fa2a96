"""Whether a pipeline can be run, said before anything runs; and what each of its steps then asks for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from math import isfinite
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

from blocks.catalogue import Catalogue, Model
from blocks.errors import InvalidRequest, ModelNotFound
from blocks.storage import Media
from blocks.validation import nearest, path, quoted, said, shortened, told
from blocks.yaml import MAX_TEXT
from flows.checks import INPUTS, Check, refuse_foreign
from flows.definition import (
    FILES,
    MAX_INPUTS,
    MAX_REFERENCES,
    MAX_STEPS,
    MAX_VALUE,
    VALUES,
    Input,
    Pipeline,
    StepDefinition,
)
from flows.entry import Entry
from flows.kinds import Kind, media_in
from flows.references import NAME, Allowance, Location, Reference, resolved


@dataclass(frozen=True, slots=True)
class Planned:
    """A step, its flow, and the steps that must have succeeded before."""

    name: str
    asked: StepDefinition
    entry: Entry
    needs: tuple[str, ...]

    @property
    def at(self) -> str:
        """The path of its parameters."""
        return f"steps.{self.name}.parameters"

    def located(self, param: str) -> str:
        """A parameter of the flow's request as the pipeline's author knows it."""
        if param.startswith("steps."):
            return param
        return f"steps.{self.name}.model" if param == "model" else f"{self.at}.{param}"


class Plan:
    """A pipeline that can be run. `steps` come in an order in which each follows what it needs.

    Args:
        flows: what a step may name as its task.
        inputs: values, and files as `Media`, by name.

    Raises:
        InvalidRequest: it cannot be run; the step and parameter at fault are in `param`.
    """

    def __init__(self, pipeline: Pipeline, inputs: Mapping[str, Any], flows: Mapping[str, Entry]) -> None:
        _check_names(pipeline)
        _check_size(pipeline)
        self.inputs = _inputs(pipeline, inputs)
        used = Counter[str]()
        planned = {
            name: Planned(name, asked, _entry(name, asked, flows), _needs(name, asked, pipeline, used))
            for name, asked in pipeline.steps.items()
        }
        self.steps = {name: planned[name] for name in _ordered(planned)}
        kinds: dict[str, Kind] = {
            name: (FILES | VALUES)[given.type] for name, given in pipeline.inputs.items()
        }
        results = {name: step.entry.result for name, step in self.steps.items()}
        allowance = Allowance()
        for step in self.steps.values():
            check = Check(step.at, self.inputs, kinds, results, allowance)
            check.refuse(step.entry.request, self._values(step, check.give))
        for name in pipeline.inputs:
            if f"{INPUTS}.{name}" not in used:
                raise _at(f"{INPUTS}.{name}", "is used by no step; leave it out")

    def models(self, catalogue: Catalogue) -> list[Model]:
        """The models that its steps use.

        Raises:
            ModelNotFound: a step names one that is not there, or is for something else.
        """
        return [model for step in self.steps.values() for model in self._models(step, catalogue)]

    def _models(self, step: Planned, catalogue: Catalogue) -> list[Model]:
        def known(reference: Reference, location: Location) -> Any:
            return self.inputs[str(reference.path[0])] if reference.source == INPUTS else ""

        named = {name: value for name, value in step.asked.parameters.items() if name.endswith("_model")}
        named = resolved(named, known, step.at)
        try:
            return step.entry.models({**named, "model": step.asked.model}, catalogue)
        except ModelNotFound as error:
            param = step.located(error.param or "model")
            raise ModelNotFound(f"{param!r}: {error.message}", param=param) from None

    def request(self, step: Planned, results: Mapping[str, BaseModel]) -> BaseModel:
        """What `step` asks of its flow.

        Args:
            results: what the steps that it needs have returned.

        Raises:
            InvalidRequest: a result does not fit after all, is too much, or lacks what is referred to.
        """
        plain = {name: result.model_dump(mode="json") for name, result in results.items()}
        give = partial(_value, step, {**plain, INPUTS: _plain(self.inputs)}, Allowance())
        values = self._values(step, give)
        try:
            request = step.entry.request.model_validate_json(to_json(values), strict=True)
        except ValidationError as error:
            raise told(error, step.at, step.entry.request) from None
        files = [media for _, media in media_in([*self.inputs.values(), *results.values()])]
        refuse_foreign(request, {(media.reference, media.path): type(media) for media in files}, step.at)
        return request

    def _values(self, step: Planned, give: Any) -> dict[str, Any]:
        """The step's request, of JSON's types."""
        values = dict(resolved(step.asked.parameters, give, step.at))
        field = step.entry.request.model_fields.get("model")
        at = f"steps.{step.name}.model"
        if field is not None and "model" in values:
            raise _at(f"{step.at}.model", f"is in the wrong place: name the model as {at!r}")
        if field is None and step.asked.model is not None:
            raise _at(at, f"is not taken by task {step.asked.task!r}; leave it out")
        if step.asked.model is not None:
            values["model"] = step.asked.model
        return values


def _at(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param!r} {problem}", param=param)


def _plain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Media) else value
        for name, value in inputs.items()
    }


def _check_names(pipeline: Pipeline) -> None:
    if not pipeline.steps:
        raise InvalidRequest("'steps' is empty; a pipeline has at least one step", param="steps")
    for kind, names, most in (("steps", pipeline.steps, MAX_STEPS), (INPUTS, pipeline.inputs, MAX_INPUTS)):
        if len(names) > most:
            raise _at(kind, f"has {len(names)} entries; at most {most} are taken")
        for name in names:
            if re.fullmatch(NAME, name) is None or name == INPUTS:
                raise _at(
                    f"{kind}.{shortened(name)}",
                    "is no name for one: a name begins with a small letter, has small letters, digits, "
                    f"- and _, at most 63, and is not {INPUTS!r}",
                )


def _check_size(pipeline: Pipeline) -> None:
    size = len(pipeline.model_dump_json(exclude_unset=True))
    if size > MAX_TEXT:
        raise _at("pipeline", f"may have at most {MAX_TEXT} characters as JSON, not {size}")


def _inputs(pipeline: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in pipeline.inputs:
            there = ", ".join(pipeline.inputs) or "none"
            raise _at(f"{INPUTS}.{shortened(name)}", f"is no input of this pipeline; there are: {there}")
    return {name: _input(name, asked, given.get(name)) for name, asked in pipeline.inputs.items()}


def _input(name: str, asked: Input, value: Any) -> Any:
    """An input's value. A client names no files: only an upload, or our own code, makes a `Media`."""
    at = f"{INPUTS}.{name}"
    file = FILES.get(asked.type)
    if file is not None and asked.default is not None:
        raise _at(f"{at}.default", f"is not possible: a {asked.type} is handed in")
    value = asked.default if value is None else value
    if value is None:
        how = f" a {asked.type}, as a file of the form in the field {at!r}" if file else f" a {asked.type}"
        raise _at(at, f"is missing:{how}")
    if file is not None and isinstance(value, str | bool | int | float):
        raise _at(at, f"must be a {asked.type}: send the file in a form, in the field {at!r}")
    if isinstance(value, float) and not isfinite(value):
        raise _at(at, f"is wrong: {value} is no number in JSON")
    if isinstance(value, str) and len(value) > MAX_VALUE:
        raise _at(at, f"may have at most {MAX_VALUE} characters, not {len(value)}; send a document as a file")
    try:
        return TypeAdapter(file or VALUES[asked.type]).validate_python(value, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_input=False, include_url=False)[0]
        raise _at(at, f"is wrong: {said(wrong)}") from None


def _entry(name: str, asked: StepDefinition, flows: Mapping[str, Entry]) -> Entry:
    if asked.task not in flows:
        problem = f"is wrong: there is no task {quoted(asked.task)}; {_there(asked.task, flows)}"
        raise _at(f"steps.{name}.task", problem)
    return flows[asked.task]


def _there(name: str, names: Collection[str]) -> str:
    return " ".join(filter(None, (nearest(name, names), f"there are: {', '.join(names) or 'none'}")))


def _needs(name: str, asked: StepDefinition, pipeline: Pipeline, used: Counter[str]) -> tuple[str, ...]:
    """The steps that step `name` refers to; its references to inputs and to steps are added to `used`."""
    needs: dict[str, None] = {}
    at = f"steps.{name}.parameters"

    def note(reference: Reference, location: Location) -> str:
        param = path(location, at)
        if reference.source == INPUTS:
            used[f"{INPUTS}.{_input_named(reference, param, pipeline)}"] += 1
        else:
            need(reference.source, param)
            used[reference.source] += 1
        if used.total() > MAX_REFERENCES:
            raise _at(param, f"has one reference too many; a pipeline may have {MAX_REFERENCES}")
        return ""

    def need(other: str, param: str) -> None:
        if other == name:
            raise _at(param, f"refers to its own step {name!r}")
        if other not in pipeline.steps:
            others = [step for step in (*pipeline.steps, INPUTS) if step != name]
            raise _at(param, f"refers to step {other!r}, which is not there; {_there(other, others)}")
        needs[other] = None

    resolved(asked.parameters, note, at)
    for index, other in enumerate(asked.after):
        need(shortened(other), f"steps.{name}.after[{index}]")
    return tuple(needs)


def _input_named(reference: Reference, param: str, pipeline: Pipeline) -> str:
    there = ", ".join(pipeline.inputs) or "none"
    name = reference.path[0] if reference.path else None
    if not isinstance(name, str):
        raise _at(param, f"refers to {reference.text}; name an input, as $inputs.name; there are: {there}")
    if name not in pipeline.inputs:
        raise _at(param, f"refers to input {name!r}, which is not there; {_there(name, pipeline.inputs)}")
    return name


def _ordered(planned: Mapping[str, Planned]) -> Iterator[str]:
    sorter = TopologicalSorter({name: step.needs for name, step in planned.items()})
    try:
        yield from list(sorter.static_order())
    except CycleError as error:
        cycle = list(reversed(error.args[1]))
        at = f"steps.{cycle[0]}"
        raise _at(at, f"waits for itself: {' -> '.join(cycle)}") from None


def _value(
    step: Planned,
    values: Mapping[str, Any],
    allowance: Allowance,
    reference: Reference,
    location: Location,
) -> Any:
    """What `reference` stands for, now that all that the step needs is there."""
    value: Any = values[reference.source]
    for part in reference.path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            size = f" of {len(value)}" if isinstance(value, list) else ""
            problem = f"refers to {reference.text}, and there is no {part!r}{size}"
            raise _at(path(location, step.at), problem) from None
    if value is None and reference.in_text:
        raise _at(path(location, step.at), f"refers to {reference.text}, which is empty")
    return allowance.take(value, reference, path(location, step.at))
