"""deployments/node/drivers/realesrgan.py with its packaged weights, under the upscale adapter."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event as Flag
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from blocks.catalogue import Catalogue, Model
from blocks.errors import InvalidRequest, LoadFailed, PayloadTooLarge
from deployments.node.adapters.upscale import UpscaleAdapter
from deployments.node.drivers.ncnn import read_layers
from deployments.node.drivers.realesrgan import RealESRGANDriver
from deployments.node.drivers.realesrgan_networks import Rim, network_of
from deployments.node.drivers.weights import resolve
from tasks.protocol.inference_pb2 import Event
from tasks.protocol.shapes import UpscaleParameters

PHOTO = Path(__file__).parents[2] / "data" / "pictures" / "astronaut.jpg"


def photo(width: int, height: int) -> Image.Image:
    return Image.open(PHOTO).crop((60, 0, 60 + width, height))


def saved(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


async def enlarge(
    driver: RealESRGANDriver, image: Image.Image, **fields: Any
) -> tuple[Image.Image, list[float]]:
    parts: list[bytes] = []
    fractions: list[float] = []

    async def media() -> AsyncIterator[bytes]:
        yield saved(image)

    async def emit(event: Event) -> None:
        parts.append(event.media.data)
        if event.HasField("progress"):
            fractions.append(event.progress.fraction)

    await UpscaleAdapter(driver).run(UpscaleParameters(**fields), media(), emit)
    return Image.open(io.BytesIO(b"".join(parts))), fractions


def difference(one: Image.Image, other: Image.Image) -> Any:
    return np.abs(np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int))


def weights(catalogue: Catalogue, name: str) -> list[dict[str, torch.Tensor]]:
    graph = resolve(catalogue.get(name))
    return list(read_layers(graph.read_text(), graph.with_suffix(".bin").read_bytes()))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("realesr-animevideov3", 621_424),
        ("realesrgan-x4plus-anime", 4_467_779),
        ("realesrgan-x4plus", 16_697_987),
    ],
)
def test_every_packaged_network_makes_pictures_four_times_as_large(
    catalogue: Catalogue, name: str, parameters: int
) -> None:
    network = network_of(weights(catalogue, name))
    assert sum(values.numel() for values in network.parameters()) == parameters
    small = photo(32, 24)
    tensor = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None].float() / 255
    with torch.inference_mode():
        made = network(tensor, Rim((0, 0, 0, 0)), lambda: None)
        cut = network(tensor, Rim((0, 5, 7, 1)), lambda: None)
    assert made.shape == (1, 3, 96, 128)
    assert torch.equal(cut, made[..., : 96 - 20, 28 : 128 - 4])
    whole = Image.fromarray((made[0].clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())
    assert difference(whole.reduce(4), small).mean() < 8  # the same picture


@pytest.mark.parametrize("scale", [2, 4])
async def test_exactly_so_many_times_as_large(realesrgan: RealESRGANDriver, scale: int) -> None:
    image = photo(61, 37)
    made, fractions = await enlarge(realesrgan, image, scale=scale)
    assert (made.mode, made.size) == ("RGB", (61 * scale, 37 * scale))
    assert fractions == [0]
    assert difference(made.reduce(scale), image).mean() < 8


async def test_tiles_show_no_seams(realesrgan: RealESRGANDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rim as wide as the network looks, tiles are what the whole is."""
    image = photo(100, 70)
    whole, _ = await enlarge(realesrgan, image)
    monkeypatch.setattr(realesrgan, "tile", 32)
    tiled, fractions = await enlarge(realesrgan, image)
    assert fractions == pytest.approx([at / 12 for at in range(12)])
    assert difference(tiled, whole).max() <= 1  # rounding
    monkeypatch.setattr(realesrgan.network, "reach", 2)
    seamed, _ = await enlarge(realesrgan, image)
    assert difference(seamed, whole).max() > 10  # so the test would see them


def test_the_large_networks_rim_is_wide_enough(catalogue: Catalogue) -> None:
    network = network_of(weights(catalogue, "realesrgan-x4plus-anime"))
    picture = torch.from_numpy(np.array(photo(150, 40))).permute(2, 0, 1)[None].float() / 255
    seen = network.reach + 16
    with torch.inference_mode():
        whole = network(picture, Rim((0, 0, 0, 150 - 16)), lambda: None)
        part = network(picture[..., :seen], Rim((0, 0, 0, network.reach)), lambda: None)
    assert (whole - part).abs().max() * 255 < 1.5


async def test_transparency_is_kept(realesrgan: RealESRGANDriver) -> None:
    """upscayl#881. What cannot be seen leaves no fringe on what can."""
    image = photo(64, 64)
    plain, _ = await enlarge(realesrgan, image)
    hidden = np.array(image)
    alpha = np.full((64, 64), 255, np.uint8)
    alpha[:, :32] = 0
    hidden[:, :32] = (0, 255, 0)
    clear = Image.fromarray(np.dstack((hidden, alpha)))
    for scale in (2, 4):
        made, _ = await enlarge(realesrgan, clear, scale=scale)
        assert (made.mode, made.size) == ("RGBA", (64 * scale, 64 * scale))
        shown = np.asarray(made.getchannel("A"))
        assert (shown[:, : 29 * scale] == 0).all()
        assert (shown[:, 35 * scale :] == 255).all()
    edge = difference(made, plain)[:, 33 * 4 : 40 * 4]
    assert edge.mean() < 12
    far = difference(made, plain)[:, 52 * 4 :]
    assert far.max() <= 1


async def test_grey_and_tiny_pictures(realesrgan: RealESRGANDriver) -> None:
    made, _ = await enlarge(realesrgan, photo(20, 20).convert("L"))
    assert np.ptp(np.asarray(made, int), axis=2).mean() < 12  # hardly any colour
    for size in ((1, 1), (1, 50), (3, 2)):
        made, _ = await enlarge(realesrgan, photo(*size), scale=2)
        assert made.size == (size[0] * 2, size[1] * 2)


async def test_what_cannot_be_done_is_told(
    realesrgan: RealESRGANDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = photo(10, 10)
    clear.putalpha(100)
    with pytest.raises(InvalidRequest, match="jpeg does not keep"):
        await enlarge(realesrgan, clear, output_format="jpeg")
    with pytest.raises(PayloadTooLarge, match=r"1025 x 1024 pixels.*takes 1048576 at most"):
        await enlarge(realesrgan, Image.new("1", (1025, 1024)))
    monkeypatch.setattr(realesrgan, "scale", 3)
    with pytest.raises(InvalidRequest, match="3 times as large, and so not 2 times") as caught:
        await enlarge(realesrgan, photo(10, 10), scale=2)
    assert caught.value.param == "scale"


async def test_who_leaves_ends_it_within_a_tile(
    realesrgan: RealESRGANDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two layers, not only between two tiles."""
    cancelled, tiles = realesrgan.counters["cancelled"], realesrgan.counters["tiles"]
    within, looks, stop_here = Flag(), 0, realesrgan._stop_here

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:  # before the tile, and before its first layer, there was one each
            within.set()
            realesrgan._here.cancelled.wait(60)
        stop_here()

    monkeypatch.setattr(realesrgan, "_stop_here", look)

    async def media() -> AsyncIterator[bytes]:
        yield saved(Image.open(PHOTO).resize((900, 900)))

    async def emit(_: Event) -> None: ...

    task = asyncio.create_task(UpscaleAdapter(realesrgan).run(UpscaleParameters(), media(), emit))
    assert await asyncio.to_thread(within.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert realesrgan.counters["cancelled"] == cancelled + 1
    assert (realesrgan.counters["tiles"], looks) == (tiles, 3)
    flag = Flag()
    flag.set()
    assert list(realesrgan.run(np.zeros((4, 4, 3), np.uint8), flag)) == []


def test_what_cannot_be_loaded(tmp_path: Path, catalogue: Catalogue) -> None:
    real = resolve(catalogue.get("realesr-animevideov3"))
    numbers = real.with_suffix(".bin").read_bytes()
    graph = tmp_path / "m.param"
    plain: dict[str, Any] = {"name": "m", "task": "upscale", "driver": "realesrgan", "source": str(graph)}
    graph.write_text(real.read_text())
    for wrong, message in (
        (None, "No such file"),
        (numbers[:-4000], "cannot be loaded"),
        (numbers + bytes(4), "there are"),
        (b"\1\2\3\4" + numbers[4:], "0x4030201"),
    ):
        if wrong is not None:
            graph.with_suffix(".bin").write_bytes(wrong)
        with pytest.raises(LoadFailed, match=message):
            RealESRGANDriver(Model(**plain)).load()
    lines = real.read_text().splitlines()
    graph.write_text("\n".join(line for line in lines if not line.startswith(("PReLU", "Convolution"))))
    graph.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(LoadFailed, match="no layers"):
        RealESRGANDriver(Model(**plain)).load()
    with pytest.raises(LoadFailed, match="option 'tile'"):
        RealESRGANDriver(Model(**plain, options={"tile": 3})).load()
