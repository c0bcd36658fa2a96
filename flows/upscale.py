"""Upscale: a larger picture of the same."""

from __future__ import annotations

from prefect import flow

from blocks.storage import Picture
from tasks.image import Image, enlarge
from tasks.protocol.shapes import UpscaleParameters


class UpscaleRequest(UpscaleParameters):
    """A picture for a model, by its name or alias in the catalogue; empty means the first of its kind."""

    model: str = ""
    file: Picture


@flow(name="upscale")
async def upscale(request: UpscaleRequest) -> Image:
    return await enlarge(request.model, request.file, request)
