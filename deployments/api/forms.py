"""Multipart forms: text fields checked by a model, and files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from blocks.errors import InvalidMedia, InvalidRequest
from blocks.validation import shortened, told
from deployments.api import parameters
from deployments.api.body import limited

M = TypeVar("M", bound=BaseModel)


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


@asynccontextmanager
async def form_of(
    request: Request, max_bytes: int, *, max_files: int = 1, file: str = "file"
) -> AsyncIterator[FormData]:
    """The request's multipart form; large files are on disk until the block ends.

    Args:
        file: the field in which the first file belongs, for the error.

    Raises:
        InvalidRequest: it is not a multipart form, or not in UTF-8.
        PayloadTooLarge: it has more than `max_bytes`.
    """
    if not is_form(request):
        raise InvalidRequest(f"send the file as multipart/form-data, in the field {file!r}")
    content_type = request.headers.get("content-type", "")
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise InvalidRequest(f"charset {shortened(charset)!r} is not taken; send the form in UTF-8")
    whole = Request(request.scope, limited(request, max_bytes))
    try:
        async with whole.form(max_files=max_files, max_fields=32) as form:
            yield form
    except HTTPException as error:
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from error


def parts(form: FormData, file: str | None = None) -> tuple[dict[str, str], dict[str, UploadFile]]:
    """The form's texts and files, by name.

    Args:
        file: the one field in which a file belongs; None if others may be files as well.

    Raises:
        InvalidRequest: a field is given more than once (but a list's, `name[]`), or is a file and should
            be text.
    """
    texts: dict[str, str] = {}
    files: dict[str, UploadFile] = {}
    for name, value in form.multi_items():
        param = shortened(name)
        if (name in texts or name in files) and not name.endswith("[]"):
            raise InvalidRequest(f"{param!r} is given more than once", param=param)
        if isinstance(value, str):
            texts[name] = value
        elif file is not None and name != file:
            raise InvalidRequest(f"{param!r} is not a file; the file belongs in {file!r}", param=param)
        else:
            files[name] = value
    return texts, files


def fields(
    form: FormData, model: type[M], neutral: Mapping[str, parameters.Neutral], file: str = "file"
) -> M:
    """The form's text fields as a `model`. Raises `InvalidRequest` naming the first one at fault."""
    texts, _ = parts(form, file)
    texts.pop(file, None)  # which `file_of` refuses
    known = {name: texts[name] for name in texts if name in model.model_fields}
    others = {name: value for name, value in texts.items() if name not in known}
    parameters.refuse_others(others, neutral, [*model.model_fields, file])
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise told(error) from None


def file_of(form: FormData, name: str = "file") -> UploadFile:
    """The form's file `name`. Raises `InvalidRequest` if there is none, `InvalidMedia` if it is empty."""
    file = form.get(name)
    if file is None:
        raise InvalidRequest(f"{name!r} is missing: a file of the form", param=name)
    if not isinstance(file, UploadFile):
        raise InvalidRequest(f"{name!r} must be a file of the form (with a filename), not text", param=name)
    if not file.size:
        raise InvalidMedia(f"{name!r} is empty (0 bytes)", param=name)
    return file
