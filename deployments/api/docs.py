"""/openapi.json: the request models of routes that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.api.auth import PUBLIC
from flows.registry import STEPS

_REF = "#/components/schemas/{model}"
_models: set[type[BaseModel]] = set()


def _body(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def takes_json(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `model` as JSON."""
    _models.add(model)
    return _body("application/json", {"$ref": _REF.format(model=model.__name__)})


def takes_form(model: type[BaseModel], file: str, field: str = "file") -> dict[str, Any]:
    """`openapi_extra` of a route whose body is a form: `model`'s fields, and a `file`, described so."""
    _models.add(model)
    upload = {
        "type": "object",
        "required": [field],
        "properties": {field: {"type": "string", "format": "binary", "description": file}},
    }
    return _body("multipart/form-data", {"allOf": [{"$ref": _REF.format(model=model.__name__)}, upload]})


def document(app: FastAPI) -> None:
    """Add those models, and the key, to what `app` says of itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            pairs = [(model, "validation") for model in sorted(_models, key=lambda model: model.__name__)]
            _, definitions = models_json_schema(pairs, ref_template=_REF)  # type: ignore[arg-type]
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            step = components["schemas"]["StepDefinition"]["properties"]
            # The flows are made after the model, and cannot be named there.
            step["task"]["enum"] = list(STEPS)
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
            for path in PUBLIC & schema["paths"].keys():
                for operation in schema["paths"][path].values():
                    operation["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
