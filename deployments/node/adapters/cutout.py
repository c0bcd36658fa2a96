"""Cutout: the subject of a picture on a transparent ground, or its mask."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from deployments.node.adapters.base import Adapter, Emit, streamed
from deployments.node.adapters.picture import Pixels, answer, last, read, refuse_format, work
from deployments.node.drivers.base import CutoutDriver
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import CutoutParameters


class CutoutAdapter(Adapter[CutoutDriver, CutoutParameters]):
    """Cutouts over any `CutoutDriver`. `Done.result` is a `PictureResult`; the picture comes before it.

    Colours stay as they are where the subject is, and are gone where it is not. What was transparent
    stays so; the driver sees white there.
    """

    shape = CutoutParameters

    async def run(self, parameters: CutoutParameters, media: AsyncIterator[bytes], emit: Emit | None) -> Done:
        emit = streamed(emit)
        picture = await read(media, self.driver.max_pixels)
        refuse_format(picture, 1, parameters.output_format)
        seen = await last(partial(_on_white, picture))
        mask = await work(partial(self.driver.run, seen), emit, self.driver.model.name)
        made = Pixels(mask) if parameters.mask else await last(partial(_cut, picture, mask))
        return await answer(made, parameters.output_format, emit)


def _on_white(picture: Pixels, cancelled: threading.Event) -> Iterator[Any]:
    if picture.alpha is None:
        yield picture.colours
        return
    from PIL import Image

    image = Image.new("RGB", picture.size, "white")
    image.paste(Image.fromarray(picture.colours), mask=Image.fromarray(picture.alpha))
    import numpy

    yield numpy.asarray(image)


def _cut(picture: Pixels, mask: Any, cancelled: threading.Event) -> Iterator[Pixels]:
    import numpy
    from PIL import Image, ImageChops

    alpha = Image.fromarray(mask)
    if picture.alpha is not None:
        alpha = ImageChops.multiply(alpha, Image.fromarray(picture.alpha))
    shown = numpy.asarray(alpha)
    picture.colours[shown == 0] = 0
    yield Pixels(picture.colours, shown, picture.profile)
