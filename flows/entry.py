"""What is known of a flow that a job, a deployment, a pipeline's step or a live request may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect import Flow
from pydantic import BaseModel

from blocks.catalogue import Catalogue, Model
from blocks.errors import ModelNotFound


@dataclass(frozen=True)
class Entry:
    """A flow, the models of its one parameter `request` and of what it returns, and the adapter of its
    heaviest step."""

    flow: Flow[Any, Any]
    request: type[BaseModel]
    result: type[BaseModel]
    task: str

    def models(self, values: Mapping[str, Any], catalogue: Catalogue) -> list[Model]:
        """The models that a request uses, that of the heaviest step first.

        Args:
            values: the request's fields that name models: `model`, and `<adapter>_model` for other steps.
                Empty or missing means the catalogue's first for that adapter.

        Raises:
            ModelNotFound: it names one that is not there or is for something else; `param` is the field.
        """
        found = [_model(catalogue, self.task, "model", values.get("model"))]
        for field in self.request.model_fields:
            adapter = field.removesuffix("_model")
            if adapter != field:
                found.append(_model(catalogue, adapter, field, values.get(field)))
        return found


def _model(catalogue: Catalogue, adapter: str, field: str, name: str | None) -> Model:
    try:
        return catalogue.get(name, adapter) if name else catalogue.default(adapter)
    except ModelNotFound as error:
        raise ModelNotFound(error.message, param=field) from None
