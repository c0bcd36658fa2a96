"""What kind of value a reference stands for, known before anything has run: from the models of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from blocks.storage import Document, Media, Picture, Recording
from blocks.validation import plain
from flows.references import Location

Kind = Any  # a type as it is annotated: str, list[Segment], Picture, ...
WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Recording: "a recording",
    Picture: "a picture",
    Document: "a document",
    Media: "a file",
}


class NoSuchPart(Exception):
    """A path leads to nothing; says what there is."""


def part_of(kind: Kind, way: Location) -> Kind:
    """The kind of what lies at `way` within a value of `kind`. Raises `NoSuchPart`."""
    for part in way:
        kind = _member(plain(kind), part)
    return plain(kind)


def _member(kind: Kind, part: str | int) -> Kind:
    origin: Any = get_origin(kind)
    arguments = get_args(kind)
    if isinstance(part, int):
        if origin is list:
            return arguments[0]
        raise NoSuchPart(f"{described(kind)} has no element [{part}]")
    if origin is dict:
        return arguments[1]
    if not _structured(kind):
        raise NoSuchPart(f"{described(kind)} has no field {part!r}")
    if part not in kind.model_fields:
        raise NoSuchPart(f"it has no field {part!r}; there are: {', '.join(kind.model_fields)}")
    return kind.model_fields[part].annotation


def is_media(kind: Kind) -> bool:
    return isinstance(kind, type) and issubclass(kind, Media)


def _structured(kind: Kind) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not is_media(kind)


def is_scalar(kind: Kind) -> bool:
    origin: Any = get_origin(kind)
    return kind in (str, int, float, bool) or origin is Literal


def described(kind: Kind) -> str:
    """A kind in words."""
    origin: Any = get_origin(kind)
    if origin is list:
        return "a list"
    if origin is Literal:
        return described(type(get_args(kind)[0]))
    if _structured(kind):
        return f"an object of {', '.join(kind.model_fields)}"
    return WORDS.get(kind, "an object")


def sample(kind: Kind, reference: Callable[[type[Media]], str]) -> Any:
    """A value of `kind`, of JSON's types. Files in it have what `reference` says.

    Raises:
        NoSuchPart: what it is cannot be known beforehand.
    """
    kind = plain(kind)
    origin: Any = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return arguments[0]
    if origin is list:
        return [sample(arguments[0], reference)]
    if origin is dict:
        return {"key": sample(arguments[1], reference)}
    if is_media(kind):
        return {"reference": reference(kind)}
    if _structured(kind):
        return {name: sample(field.annotation, reference) for name, field in kind.model_fields.items()}
    samples: dict[Any, Any] = {str: "text", int: 1, float: 1.5, bool: True}
    if kind not in samples:
        raise NoSuchPart("what it is cannot be known before it runs; refer to something inside it")
    return samples[kind]


def media_in(value: Any, location: Location = ()) -> Iterator[tuple[Location, Media]]:
    """Each file in a model, with where it is."""
    if isinstance(value, Media):
        yield location, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from media_in(getattr(value, name), (*location, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from media_in(item, (*location, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from media_in(item, (*location, index))
