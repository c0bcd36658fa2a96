"""A flow's request out of a client's values, with what is wrong told by name and without content."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from blocks.catalogue import Catalogue
from blocks.validation import told
from flows.entry import Entry
from flows.pipeline import PipelineRequest

M = TypeVar("M", bound=BaseModel)


def parsed(model: type[M], values: Any, strict: bool = False) -> M:
    """`values` as a `model`. Unless `strict`, numbers may be text, as they are in forms.

    Raises:
        InvalidRequest: naming the parameter by its path, never its value.
    """
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        raise told(error, model=model) from None


def heaviest_model(entry: Entry, request: BaseModel, catalogue: Catalogue) -> str:
    """The model of the flow's heaviest step, by its name in the catalogue.

    Raises:
        ModelNotFound: the request names a model that is not there, or is for something else.
    """
    if isinstance(request, PipelineRequest):
        return max(request.plan.models(catalogue), key=lambda model: model.memory).name
    return entry.models(dict(request), catalogue)[0].name
