"""POST /v1/images/cutouts and /v1/images/upscales: forms like those of OpenAI's /v1/images/edits."""

from __future__ import annotations

import asyncio
import base64
from contextlib import closing
from typing import Any, Literal

from prefect import Flow
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import InvalidRequest
from blocks.storage import Picture
from deployments.api.docs import takes_form
from deployments.api.forms import fields, file_of, form_of
from deployments.api.live import LiveRoute, answered, json_response, named, origin, origin_headers
from deployments.api.parameters import IMAGES
from flows.cutout import CutoutRequest, cutout
from flows.upscale import UpscaleRequest, upscale
from tasks.fleet import current_fleet
from tasks.image import Image
from tasks.live import LiveRun
from tasks.protocol.shapes import CutoutParameters, UpscaleParameters

FIELD, ALSO = "image", "image[]"  # OpenAI's clients send a list of pictures by the second name


class _Form(BaseModel):
    model: str = Field("", description="by name or alias in the catalogue; empty: the first of its kind")
    response_format: Literal["b64_json", "binary"] = Field(
        "b64_json", description="binary: the bytes of the picture, and nothing else"
    )


class CutoutForm(_Form, CutoutParameters):
    """The form's fields besides `image`."""


class UpscaleForm(_Form, UpscaleParameters):
    """The form's fields besides `image`."""


async def create_cutout(request: Request) -> Response:
    """The subject of `image` on a transparent ground; with `mask` its mask."""
    return await _create(request, CutoutForm, cutout, CutoutRequest)


async def create_upscale(request: Request) -> Response:
    """`image`, `scale` times as wide and as high; transparency is kept."""
    return await _create(request, UpscaleForm, upscale, UpscaleRequest)


async def _create(
    request: Request,
    form_model: type[CutoutForm | UpscaleForm],
    flow: Flow[Any, Any],
    flow_request: type[CutoutRequest | UpscaleRequest],
) -> Response:
    async with form_of(request, request.app.state.settings.max_upload, file=FIELD) as form:
        field = ALSO if ALSO in form and FIELD not in form else FIELD
        asked = fields(form, form_model, IMAGES, field)
        if asked.model:
            await named(asked.model, flow.name)
        upload = file_of(form, field)
        picture = Picture.upload(upload.file, upload.filename or "")
        question = flow_request(**asked.model_dump(exclude={"response_format"}), file=picture)
        try:
            made, run = await answered(request, flow, question)
        except InvalidRequest as error:
            if error.param == "file":  # as the flow names it
                error.param = field
            raise
    storage = (await current_fleet()).storage
    with closing(made.picture.open(storage)) as file:
        data = await asyncio.to_thread(file.read)
    if asked.response_format == "binary":
        return Response(data, headers=origin_headers(run), media_type=made.picture.content_type)
    return await asyncio.to_thread(json_response, await _told(run, made, data), run)


async def _told(run: LiveRun, made: Image, data: bytes) -> dict[str, Any]:
    """As OpenAI answers an edit."""
    encoded = await asyncio.to_thread(base64.b64encode, data)
    return {
        "created": int(run.started),
        "data": [{"b64_json": encoded.decode()}],
        "output_format": made.picture.content_type.removeprefix("image/"),
        "size": f"{made.width}x{made.height}",
        "smi": origin(run),
    }


ROUTES = (
    LiveRoute(
        "/v1/images/cutouts",
        create_cutout,
        "images",
        "Cut the subject out of a picture",
        takes_form(CutoutForm, "the picture: png, jpeg, webp, gif or bmp", FIELD),
    ),
    LiveRoute(
        "/v1/images/upscales",
        create_upscale,
        "images",
        "Make a picture larger",
        takes_form(UpscaleForm, "the picture: png, jpeg, webp, gif or bmp", FIELD),
    ),
)
