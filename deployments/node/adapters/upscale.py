"""Upscale: a larger picture of the same."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from blocks.errors import InvalidRequest
from deployments.node.adapters.base import Adapter, Emit, streamed
from deployments.node.adapters.picture import Pixels, answer, last, read, refuse_format, work
from deployments.node.drivers.base import UpscaleDriver
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import UpscaleParameters


class UpscaleAdapter(Adapter[UpscaleDriver, UpscaleParameters]):
    """Upscales over any `UpscaleDriver`. `Done.result` is a `PictureResult`; the picture comes before it.

    A driver that makes more than was asked for has its picture averaged down. Transparency is enlarged
    by Lanczos' filter; the driver sees, where nothing is to be seen, the colours from near by.
    """

    shape = UpscaleParameters

    async def run(
        self, parameters: UpscaleParameters, media: AsyncIterator[bytes], emit: Emit | None
    ) -> Done:
        emit, scale = streamed(emit), parameters.scale
        surplus, rest = divmod(self.driver.scale, scale)
        if rest or not surplus:
            raise InvalidRequest(
                f"model {self.driver.model.name!r} makes pictures {self.driver.scale} times as large, "
                f"and so not {scale} times",
                param="scale",
            )
        picture = await read(media, self.driver.max_pixels)
        refuse_format(picture, scale, parameters.output_format)
        seen = await last(partial(_filled, picture))
        colours = await work(partial(self.driver.run, seen), emit, self.driver.model.name)
        made = await last(partial(_whole, picture, colours, surplus))
        return await answer(made, parameters.output_format, emit)


def _filled(picture: Pixels, cancelled: threading.Event) -> Iterator[Any]:
    """The colours; those that cannot be seen are taken from near by, so that no fringe comes of them."""
    if picture.alpha is None:
        yield picture.colours
        return
    seen = picture.alpha > 0
    filled = _spread(picture.colours.astype("float32"), seen.astype("float32")[..., None])
    filled[seen] = picture.colours[seen]
    yield filled.round().astype("uint8")


def _spread(colours: Any, weight: Any) -> Any:
    """Fill what has no weight from a picture half as large, filled in the same way.

    Args:
        colours: float32 (height, width, 3).
        weight: float32 (height, width, 1), 1 where the colour counts, 0 where it does not.
    """
    import numpy

    height, width, _ = colours.shape
    if height * width == 1 or weight.all():
        return colours
    rim = ((0, height % 2), (0, width % 2), (0, 0))
    known = numpy.pad(weight, rim)
    total = _halved(numpy.pad(colours * weight, rim))
    counted = _halved(known)
    half = _spread(total / numpy.maximum(counted, 1), numpy.minimum(counted, 1))
    doubled = half.repeat(2, 0).repeat(2, 1)[:height, :width]
    return colours * weight + doubled * (1 - weight)


def _halved(values: Any) -> Any:
    """Sums of squares of four, of an array of shape (even, even, channels)."""
    return values[::2, ::2] + values[1::2, ::2] + values[::2, 1::2] + values[1::2, 1::2]


def _whole(picture: Pixels, colours: Any, surplus: int, cancelled: threading.Event) -> Iterator[Pixels]:
    import numpy
    from PIL import Image

    if surplus > 1:
        colours = numpy.asarray(Image.fromarray(colours).reduce(surplus))
    alpha = None
    if picture.alpha is not None:
        size = colours.shape[1], colours.shape[0]
        enlarged = Image.fromarray(picture.alpha).resize(size, Image.Resampling.LANCZOS)
        alpha = numpy.asarray(enlarged)
    yield Pixels(colours, alpha, picture.profile)
