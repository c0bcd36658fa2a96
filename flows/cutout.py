"""Cutout: the subject of a picture on a transparent ground."""

from __future__ import annotations

from prefect import flow

from blocks.storage import Picture
from tasks.image import Image, cut_out
from tasks.protocol.shapes import CutoutParameters


class CutoutRequest(CutoutParameters):
    """A picture for a model, by its name or alias in the catalogue; empty means the first of its kind."""

    model: str = ""
    file: Picture


@flow(name="cutout")
async def cutout(request: CutoutRequest) -> Image:
    return await cut_out(request.model, request.file, request)
