"""A driver's `options` in the catalogue, checked against the model that defines them."""

from __future__ import annotations

import os
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from blocks.catalogue import Model
from blocks.errors import LoadFailed

Shape = TypeVar("Shape", bound=BaseModel)


def read_options(model: Model, shape: type[Shape]) -> Shape:
    """The model's options as `shape`. Raises `LoadFailed` naming the bad one and those there are."""
    try:
        return shape.model_validate(model.options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise LoadFailed(
            f"model {model.name!r}: option {name!r}: {first['msg'].lower()}; "
            f"options are: {', '.join(shape.model_fields)}"
        ) from None


def default_threads() -> int:
    """Half of the cores this process may use: the other half serves requests."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // 2)
