"""deployments/node/adapters/picture.py: what comes in, and what goes out."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from blocks.errors import InvalidMedia, InvalidRequest, PayloadTooLarge
from deployments.node.adapters import picture
from deployments.node.adapters.picture import Pixels, answer, read, refuse_format
from tasks.protocol.inference_pb2 import Event
from tasks.protocol.shapes import PictureFormat, PictureResult

PHOTO = Path(__file__).parents[2] / "data" / "pictures" / "astronaut.jpg"
LIMIT = 1 << 20


def photo(width: int = 96, height: int = 64) -> Image.Image:
    return Image.open(PHOTO).resize((width, height))


def saved(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1000):
        yield data[at : at + 1000]


async def pixels(data: bytes, limit: int = LIMIT) -> Pixels:
    return await read(chunks(data), limit)


async def written(made: Pixels, kind: PictureFormat) -> tuple[Image.Image, list[Event], PictureResult]:
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    done = await answer(made, kind, emit)
    data = b"".join(event.media.data for event in events)
    return Image.open(io.BytesIO(data)), events, PictureResult.model_validate_json(done.result)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp"])
async def test_the_usual_formats(kind: str) -> None:
    found = await pixels(saved(photo(), kind))
    assert (found.size, found.alpha) == ((96, 64), None)
    difference = np.abs(found.colours.astype(int) - np.asarray(photo()))
    assert difference.mean() < 12  # gif has 256 colours


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK"])
async def test_every_mode_becomes_rgb(mode: str) -> None:
    """EasyOCR#1308: CMYK, palette, greyscale."""
    image = photo()
    if mode in ("RGBA", "LA", "PA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        image = image.convert("P" if mode == "PA" else mode)
    else:
        image = image.convert(mode)
    kind = "jpeg" if mode == "CMYK" else "png"
    found = await pixels(saved(image, kind))
    assert found.colours.shape == (64, 96, 3)
    assert found.colours.dtype == np.uint8
    assert (found.alpha is not None) == (mode in ("RGBA", "LA")) or mode == "PA"
    grey = np.asarray(photo().convert("L"), int)
    seen = np.asarray(Image.fromarray(found.colours).convert("L"), int)
    assert np.corrcoef(grey.ravel(), seen.ravel())[0, 1] > (0.5 if mode == "1" else 0.95)


async def test_transparency_is_kept_apart() -> None:
    image = photo()
    ramp = Image.linear_gradient("L").resize(image.size)
    image.putalpha(ramp)
    found = await pixels(saved(image))
    assert (found.alpha == np.asarray(ramp)).all()
    assert (found.colours == np.asarray(photo())).all()
    palette = photo().quantize(16)
    found = await pixels(saved(palette, transparency=3))
    assert (found.alpha == np.where(np.asarray(palette) == 3, 0, 255)).all()


async def test_16_bits_of_grey_become_8() -> None:
    """As they are, they would be cut at 255."""
    grey = (np.arange(64 * 96).reshape(64, 96) * 10).astype(np.uint16)
    found = await pixels(saved(Image.fromarray(grey)))
    assert (found.colours == (grey >> 8)[..., None]).all()
    assert found.alpha is None
    with_key = saved(Image.fromarray(grey))
    key = b"tRNS" + struct.pack(">H", 500)
    chunk = struct.pack(">I", 2) + key + struct.pack(">I", zlib.crc32(key))
    start = with_key.index(b"IDAT") - 4
    found = await pixels(with_key[:start] + chunk + with_key[start:])
    assert (found.alpha == np.where(grey == 500, 0, 255)).all()


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
async def test_exif_rotation_is_done(kind: str) -> None:
    """rembg#13."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    found = await pixels(saved(photo(), kind, exif=exif))
    assert found.size == (64, 96)
    upright = np.asarray(photo().transpose(Image.Transpose.ROTATE_270), int)
    assert np.abs(found.colours - upright).mean() < 12
    image, _, _ = await written(found, "png")
    assert 0x0112 not in image.getexif()


async def test_a_profile_of_rgb_is_kept() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    found = await pixels(saved(photo(), icc_profile=profile))
    for kind in ("png", "webp", "jpeg"):
        image, _, _ = await written(found, kind)  # type: ignore[arg-type]
        assert image.info["icc_profile"] == profile


async def test_a_profile_that_is_broken_or_of_other_colours_is_not_kept() -> None:
    for profile in (b"broken", bytes(16) + b"GRAY" + bytes(200), bytes(16) + b"CMYK" + bytes(200)):
        found = await pixels(saved(photo().convert("L"), icc_profile=profile))
        assert found.profile is None
        assert (found.colours == np.asarray(photo().convert("L"))[..., None]).all()


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
async def test_animated_pictures_are_refused(kind: str) -> None:
    """flask-iiif#41."""
    data = saved(photo(), kind, save_all=True, append_images=[photo().rotate(90), photo().rotate(180)])
    with pytest.raises(InvalidMedia, match="holds 3 pictures"):
        await pixels(data)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp"])
async def test_pictures_that_break_off_are_refused(kind: str) -> None:
    data = saved(photo(), kind)
    for size in (20, len(data) // 3, len(data) - 50):
        with pytest.raises(InvalidMedia, match=r"no picture|breaks off"):
            await pixels(data[:size])


@pytest.mark.parametrize(
    "data",
    [b"text" * 99, b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", bytes(5000)],
)
async def test_what_is_no_picture_is_refused(data: bytes) -> None:
    """SVG is no picture here, whatever its name."""
    with pytest.raises(InvalidMedia, match="give png, jpeg, webp, gif or bmp") as caught:
        await pixels(data)
    assert caught.value.param == "file"


async def test_no_bytes_are_no_picture() -> None:
    with pytest.raises(InvalidMedia, match=r"the picture is empty \(0 bytes\)"):
        await pixels(b"")


async def test_a_fault_of_ours_is_not_told_as_one_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(_: Image.Image) -> Pixels:
        raise LookupError("ours")

    monkeypatch.setattr(picture, "_split", faulty)
    with pytest.raises(LookupError, match="ours"):
        await pixels(saved(photo()))


async def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    """zulip#11215: 400 million pixels in 400 bytes."""
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    idat = b"IDAT" + zlib.compress(bytes(1000))
    data += struct.pack(">I", len(idat) - 4) + idat + struct.pack(">I", zlib.crc32(idat))
    with pytest.raises(PayloadTooLarge, match=r"20000 x 20000 pixels.*1048576 at most"):
        await pixels(data)
    whole = await pixels(saved(Image.new("1", (1024, 1024))))
    assert whole.size == (1024, 1024)


async def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BYTES", 1 << 20)
    with pytest.raises(PayloadTooLarge, match="the picture is larger than 1 MiB"):
        await pixels(bytes((1 << 20) + 1))


async def test_what_is_written_can_be_read() -> None:
    colours = np.asarray(photo(700, 500))
    alpha = np.asarray(Image.linear_gradient("L").resize((700, 500)))
    image, events, result = await written(Pixels(colours, alpha), "png")
    assert (np.asarray(image) == np.dstack((colours, alpha))).all()
    assert len(events) > 1
    assert {event.media.content_type for event in events} == {"image/png"}
    assert (result.content_type, result.width, result.height) == ("image/png", 700, 500)
    image, _, _ = await written(Pixels(colours, alpha), "webp")
    assert (np.asarray(image.getchannel("A")) == alpha).all()
    assert np.abs(np.asarray(image.convert("RGB"), int) - colours)[alpha > 0].mean() < 6
    image, _, _ = await written(Pixels(alpha), "webp")
    assert (np.asarray(image.convert("L")) == alpha).all()  # a mask loses nothing
    image, _, _ = await written(Pixels(colours, np.full_like(alpha, 255)), "jpeg")
    assert (image.format, image.size) == ("JPEG", (700, 500))


def test_what_a_format_cannot_hold_is_refused() -> None:
    wide = Pixels(np.zeros((1, 5000, 3), np.uint8))
    refuse_format(wide, 4, "png")
    refuse_format(wide, 4, "jpeg")
    with pytest.raises(InvalidRequest, match="webp holds 16383 pixels a side at most, not 20000 x 4"):
        refuse_format(wide, 4, "webp")
    clear = Pixels(np.zeros((2, 2, 3), np.uint8), np.array([[255, 255], [255, 254]], np.uint8))
    with pytest.raises(InvalidRequest, match="jpeg does not keep") as caught:
        refuse_format(clear, 1, "jpeg")
    assert caught.value.param == "output_format"
