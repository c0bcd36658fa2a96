"""Errors in OpenAI's shape."""

from __future__ import annotations

import logging
import traceback
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import InvalidRequest, NotFound, SmiError, Unavailable
from blocks.validation import in_words, told
from deployments.database import away

M = TypeVar("M", bound=BaseModel)
log = logging.getLogger("smi.api")


class MethodNotAllowed(InvalidRequest):
    code, status = "method_not_allowed", 405


class HeadersTooLarge(InvalidRequest):
    code, status = "headers_too_large", 431


def error_body(error: SmiError) -> bytes:
    """The error as OpenAI words it, in JSON."""
    told = {"message": error.whole, "type": error.type, "param": error.param, "code": error.code}
    return to_json({"error": told})


def error_response(error: SmiError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), error.status, headers, "application/json")


def unexpected(error: BaseException, request_id: str) -> SmiError:
    """Log where an unforeseen error happened, and say nothing of it to the client.

    Neither tells the error's own text: that of a validation error, say, holds the request's content.
    """
    if away(error):
        log.error("request %s: the database does not answer (%s)", request_id, type(error).__name__)
        return Unavailable("the database does not answer; try again", retry_after=5)
    frames = []
    cause: BaseException | None = error
    while cause is not None:
        frames += [*traceback.format_tb(cause.__traceback__), f"{type(cause).__qualname__}\n"]
        cause = cause.__cause__ or cause.__context__
    log.error("request %s failed:\n%s", request_id, "".join(frames).rstrip())
    return SmiError(f"something went wrong here; the log knows more under request id {request_id}")


def parse(model: type[M], body: bytes) -> M:
    """`body` as `model`; numbers in quotes and the like are refused.

    Raises:
        InvalidRequest: naming the first parameter at fault by its path.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise told(error, model=model) from None


async def _smi_error(request: Request, error: Any) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: Any) -> Response:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        response = error_response(MethodNotAllowed(f"{where} does not exist; use {allowed}"))
        response.headers["allow"] = allowed
        return response
    if error.status_code == 404:
        return error_response(NotFound(f"{where} does not exist; /docs lists what does"))
    return error_response(InvalidRequest(str(error.detail)))


async def _validation_error(request: Request, error: Any) -> Response:
    detail = dict(error.errors()[0])
    detail["loc"] = detail["loc"][1:]  # "body", "query", "path"
    return error_response(in_words(detail))  # type: ignore[arg-type]


def add_error_handlers(app: FastAPI) -> None:
    """Make every refusal of `app` OpenAI-shaped. What is unforeseen is the middleware's."""
    app.add_exception_handler(SmiError, _smi_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
