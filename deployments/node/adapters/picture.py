"""Pictures in the usual formats to pixels and back.

What the bytes are is found out from the bytes, never from a name. Size is looked at before anything is
decoded. EXIF's rotation is done, transparency kept apart, a colour profile kept.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

from blocks.errors import InvalidMedia, InvalidRequest, PayloadTooLarge, UpstreamFailed
from deployments.node.adapters.base import Emit, send, working
from deployments.node.adapters.upload import IN_MEMORY, spool
from deployments.node.bridge import driving
from deployments.node.drivers.base import Working
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import PictureFormat, PictureResult

if TYPE_CHECKING:
    from PIL import Image
    from PIL.Image import Image as Pillow

T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
KNOWN = "give png, jpeg, webp, gif or bmp"
MAX_BYTES = 256 << 20
SIDES = {"png": 2**31 - 1, "webp": 16_383, "jpeg": 65_500}  # pixels; what the formats can hold
QUALITY = {"webp": {"quality": 90}, "jpeg": {"quality": 92}, "png": {"compress_level": 4}}
# What Pillow raises for bytes that are not what they should be.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture.

    Attributes:
        colours: uint8 (height, width, 3), RGB; of a mask (height, width).
        alpha: uint8 (height, width), 255 is opaque; None where it has no transparency.
        profile: ICC profile of the colours; None for sRGB.
    """

    colours: Any
    alpha: Any = None
    profile: bytes | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.colours.shape[1], self.colours.shape[0]


async def read(media: AsyncIterator[bytes], max_pixels: int) -> Pixels:
    """The picture that a request brings.

    Raises:
        InvalidMedia: for bytes that are no still picture, or break off.
        PayloadTooLarge: for more than `max_pixels`, or too many bytes.
    """
    with SpooledTemporaryFile(IN_MEMORY) as upload:
        await spool(media, upload, MAX_BYTES, "picture")
        return await last(partial(_decode, upload, max_pixels))


async def work(
    start: Callable[[threading.Event], Iterator[Any] | AsyncIterator[Any]], emit: Emit, name: str
) -> Any:
    """What a driver's `run` yields last; how far it is goes to the client. `name` is the model's."""
    made = None
    async with driving(start) as items:
        async for item in items:
            if isinstance(item, Working):
                await emit(working(item.fraction))
            else:
                made = item
    if made is None:
        raise UpstreamFailed(f"model {name} broke off; try again")
    return made


async def answer(picture: Pixels, output_format: PictureFormat, emit: Emit) -> Done:
    """Encode `picture` and send it."""
    data = await last(partial(_encode, picture, output_format))
    content_type = f"image/{output_format}"
    await send(data, content_type, emit)
    width, height = picture.size
    result = PictureResult(content_type=content_type, width=width, height=height)
    return Done(finish_reason="stop", result=result.model_dump_json().encode())


async def last(start: Callable[[threading.Event], Iterator[T]]) -> T:
    """The last item of a generator that runs in a thread; left early, it is waited for."""
    async with driving(start) as items:
        return [item async for item in items][-1]


def refuse_format(picture: Pixels, scale: int, output_format: PictureFormat) -> None:
    """Raises `InvalidRequest` if `picture`, `scale` times as large, cannot be in that format."""
    width, height = (side * scale for side in picture.size)
    most = SIDES[output_format]
    if max(width, height) > most:
        raise InvalidRequest(
            f"{output_format} holds {most} pixels a side at most, not {width} x {height}; ask for png",
            param="output_format",
        )
    if output_format == "jpeg" and picture.alpha is not None and picture.alpha.min() < 255:
        raise InvalidRequest(
            "the picture has transparency, which jpeg does not keep; ask for png or webp",
            param="output_format",
        )


def _decode(upload: IO[bytes], max_pixels: int, cancelled: threading.Event) -> Iterator[Pixels]:
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # our own limit, and not a warning
    with _pillow_reads():
        image = Image.open(upload, formats=FORMATS)
    with image:
        _refuse(image, max_pixels)
        with _pillow_reads():
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
        yield _split(image)


@contextmanager
def _pillow_reads() -> Iterator[None]:
    """Tells what Pillow raises within as what is wrong with the file. Nothing of our own belongs in it."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise InvalidMedia(f"the file is no picture that is known here; {KNOWN}", param="file") from None
    except BROKEN:
        raise InvalidMedia("the picture breaks off, or is broken in itself", param="file") from None


def _refuse(image: Pillow, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise PayloadTooLarge(
            f"the picture has {width} x {height} pixels, {width * height} in all; this model takes "
            f"{max_pixels} at most: make it smaller, or use another model",
            param="file",
        )
    with _pillow_reads():
        frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a camera's JPEG with further views in it
        raise InvalidMedia(
            f"the file holds {frames} pictures (it is animated); give one that stands still", param="file"
        )


def _split(image: Pillow) -> Pixels:
    import numpy

    if image.mode.startswith("I"):
        return Pixels(*_from_16_bits(image))
    alpha = None
    profile: bytes | None = image.info.get("icc_profile") or None
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = numpy.asarray(image.getchannel("A"))
    image, profile = _in_rgb(image, profile)
    return Pixels(numpy.array(image), alpha, profile)


def _from_16_bits(image: Pillow) -> tuple[Any, Any]:
    """Grey of 16 bits as colours of 8, and its alpha: one grey may be named as transparent."""
    import numpy

    grey = numpy.asarray(image)
    clear = image.info.get("transparency")
    alpha = numpy.where(grey == clear, 0, 255).astype(numpy.uint8) if isinstance(clear, int) else None
    return numpy.repeat((grey >> 8).astype(numpy.uint8)[..., None], 3, 2), alpha


def _in_rgb(image: Pillow, profile: bytes | None) -> tuple[Pillow, bytes | None]:
    """`image` in RGB, with its profile if that is of RGB; else its colours are turned into sRGB."""
    kind = profile[16:20] if profile else b""
    if kind == b"RGB ":
        return image.convert("RGB"), profile
    if profile and (image.mode, kind) in {("CMYK", b"CMYK"), ("L", b"GRAY")}:
        from PIL import ImageCms

        try:
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            managed = ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, OSError):
            managed = None  # the profile is broken; the picture is not
        if managed is not None:
            return managed, None
    return image.convert("RGB"), None


class _Sink(io.BytesIO):
    """Where an encoder writes, as long as the picture is wanted."""

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self._cancelled = cancelled

    def write(self, data: Any) -> int:
        if self._cancelled.is_set():
            raise _Stopped
        return super().write(data)


class _Stopped(Exception):
    """The picture is not wanted any more."""


def _encode(picture: Pixels, output_format: PictureFormat, cancelled: threading.Event) -> Iterator[bytes]:
    image = _as_pillow(picture, output_format)
    sink = _Sink(cancelled)
    options: dict[str, Any] = dict(QUALITY[output_format])
    if image.mode == "L" and output_format == "webp":
        options["lossless"] = True  # a mask is not to be looked at
    if picture.profile is not None:
        options["icc_profile"] = picture.profile
    image.save(sink, output_format, **options)
    yield sink.getvalue()


def _as_pillow(picture: Pixels, output_format: PictureFormat) -> Image.Image:
    import numpy
    from PIL import Image

    if picture.alpha is None or output_format == "jpeg":  # which is given what is opaque only
        return Image.fromarray(picture.colours)
    return Image.fromarray(numpy.dstack((picture.colours, picture.alpha)))  # Pillow takes it as it lies
