"""Steps that work on pictures."""

from __future__ import annotations

from pydantic import BaseModel

from blocks.storage import Media, Picture
from tasks.job import Priority
from tasks.media import produce
from tasks.protocol.shapes import CutoutParameters, Parameters, PictureResult, UpscaleParameters
from tasks.step import step


class Image(BaseModel):
    """A picture that was made; width and height in pixels."""

    picture: Picture
    width: int
    height: int


@step
async def cut_out(
    model: str, picture: Media, parameters: CutoutParameters, priority: Priority | None = None
) -> Image:
    """The subject of `picture` on a transparent ground (or its mask)."""
    name = f"cutout.{parameters.output_format}"
    return await _made("cutout", model, picture, parameters, name, priority)


@step
async def enlarge(
    model: str, picture: Media, parameters: UpscaleParameters, priority: Priority | None = None
) -> Image:
    """`picture`, `parameters.scale` times as wide and as high."""
    name = f"upscaled.{parameters.output_format}"
    return await _made("upscale", model, picture, parameters, name, priority)


async def _made(
    task: str, model: str, picture: Media, parameters: Parameters, name: str, priority: Priority | None
) -> Image:
    made, done = await produce(
        task, model, parameters, kind=Picture, name=name, media=picture, priority=priority
    )
    size = PictureResult.model_validate_json(done.result)
    return Image(picture=made, width=size.width, height=size.height)
