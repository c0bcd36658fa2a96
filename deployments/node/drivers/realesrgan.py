"""Larger pictures with Real-ESRGAN, from weights in ncnn's format.

A picture is worked on in tiles, each with a rim as wide as the network looks, so that memory is bounded
and the tiles show no seams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from blocks.catalogue import Model
from blocks.errors import LoadFailed
from deployments.node.drivers.base import UpscaleDriver, Working
from deployments.node.drivers.devices import memory_told, torch_device
from deployments.node.drivers.ncnn import read_layers
from deployments.node.drivers.options import read_options
from deployments.node.drivers.weights import resolve

if TYPE_CHECKING:
    from deployments.node.drivers.realesrgan_networks import Rim

# Pixels that a request may have, where `max_pixels` is not given. On one CPU core 1 MiPx is 10 to 20 s
# with the compact network and 20 minutes with the large one.
ON_GPU, COMPACT_ON_CPU, LARGE_ON_CPU = 4 << 20, 1 << 20, 1 << 18


class RealESRGANOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field("auto", description="cpu, cuda, cuda:1; auto: cuda where there is one")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: half of the cores")
    tile: int | None = Field(
        None, ge=16, description="side of a tile in pixels, without its rim; default: 192, on a GPU 512"
    )
    max_pixels: int | None = Field(
        None, ge=1, description="of a picture; default: 2^20, large networks 2^18, on a GPU 2^22"
    )


class RealESRGANDriver(UpscaleDriver):
    """One network, one picture at a time. Half precision on a GPU."""

    preload: ClassVar[tuple[str, ...]] = ("torch", "numpy", "PIL.Image")

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._here = threading.local()  # the event of the picture that this thread works on

    def load(self) -> None:
        options = read_options(self.model, RealESRGANOptions)
        try:
            import torch
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'realesrgan' needs the package {error.name}; "
                "run `pip install 'smi[torch,images]'`"
            ) from error
        from deployments.node.drivers.realesrgan_networks import SCALE, RRDBNet, network_of

        device = torch_device(options.device, options.threads)
        graph = resolve(self.model)
        try:
            layers = list(read_layers(graph.read_text(), graph.with_suffix(".bin").read_bytes()))
            network = network_of(layers)
            on_gpu = torch.device(device).type != "cpu"
            self.dtype = torch.float16 if on_gpu else torch.float32
            with memory_told(f"model {self.model.name!r} does not fit into the memory of {device}"):
                self.network = network.to(device, self.dtype)
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise LoadFailed(
                f"model {self.model.name!r} cannot be loaded from {graph} (NAME.param, beside it NAME.bin): "
                f"{error}"
            ) from error
        self.device, self.scale = device, SCALE
        self.tile = options.tile or (512 if on_gpu else 192)
        on_cpu = LARGE_ON_CPU if isinstance(network, RRDBNet) else COMPACT_ON_CPU
        self.max_pixels = options.max_pixels or (ON_GPU if on_gpu else on_cpu)

    def run(self, picture: Any, cancelled: threading.Event) -> Iterator[Working | Any]:
        import numpy

        self.counters["calls"] += 1
        height, width, _ = picture.shape
        made = numpy.empty((height * self.scale, width * self.scale, 3), numpy.uint8)
        places = [(y, x) for y in range(0, height, self.tile) for x in range(0, width, self.tile)]
        self._here.cancelled = cancelled
        full = (
            f"model {self.model.name!r}: no memory left for a tile of {self.tile} pixels; "
            "set its option `tile` lower"
        )
        with self.counting(cancelled), suppress(_Stopped), memory_told(full):
            for at, (y, x) in enumerate(places):
                self._stop_here()
                yield Working(at / len(places))
                piece = self._enlarged(picture, y, x)
                made[
                    y * self.scale : y * self.scale + piece.shape[0],
                    x * self.scale : x * self.scale + piece.shape[1],
                ] = piece
                self.counters["tiles"] += 1
            yield made

    def _enlarged(self, picture: Any, y: int, x: int) -> Any:
        """The tile at `y`, `x`, enlarged: uint8 (height, width, 3)."""
        import torch

        with torch.inference_mode():
            part, rim = self._part(picture, y, x)
            tensor = torch.from_numpy(part).to(self.device).permute(2, 0, 1)[None]
            tensor = tensor.to(self.dtype, memory_format=torch.channels_last).div_(255)
            out = self.network(tensor, rim, self._stop_here)[0].float()
            return out.mul_(255).round_().clamp_(0, 255).byte().permute(1, 2, 0).cpu().numpy()

    def _part(self, picture: Any, y: int, x: int) -> tuple[Any, Rim]:
        """The tile with its rim, which is narrower where the picture ends."""
        from deployments.node.drivers.realesrgan_networks import Rim

        height, width, _ = picture.shape
        reach, bottom, right = self.network.reach, min(height, y + self.tile), min(width, x + self.tile)
        rim = Rim((min(reach, y), min(reach, height - bottom), min(reach, x), min(reach, width - right)))
        return picture[y - rim[0] : bottom + rim[1], x - rim[2] : right + rim[3]].copy(), rim

    def _stop_here(self) -> None:
        if self._here.cancelled.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The picture is not wanted any more."""
