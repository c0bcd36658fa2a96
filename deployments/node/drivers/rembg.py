"""The subject of a picture with rembg's networks (U²-Net and its kin, in ONNX).

What rembg does around the network is done here as it does it, and its masks come out bit for bit (tests).
rembg itself is not imported: with numba and pymatting, which only its matting needs, it is 380 MB and
takes 100 s to be imported for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from blocks.errors import LoadFailed, OutOfMemory, UpstreamFailed
from deployments.node.drivers.base import CutoutDriver, Working
from deployments.node.drivers.memory import give_back_large
from deployments.node.drivers.options import default_threads, read_options
from deployments.node.drivers.weights import resolve

LOOK_S = 0.02  # between looks at whether the mask is still wanted
Channels = tuple[float, float, float]


class RembgOptions(BaseModel):
    """The catalogue's `options` for this driver. Mean and deviation are those of U²-Net."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field("auto", description="cpu, cuda; auto: cuda where onnxruntime has it")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: half of the cores")
    max_pixels: int = Field(1 << 24, ge=1, description="of a picture")
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)


class RembgDriver(CutoutDriver):
    """One network, one picture at a time."""

    preload: ClassVar[tuple[str, ...]] = ("numpy", "onnxruntime", "PIL.Image")

    def load(self) -> None:
        self.options = read_options(self.model, RembgOptions)
        self.max_pixels = self.options.max_pixels
        try:
            import onnxruntime
            import PIL.Image  # noqa: F401 (missing, it is to be told now)
            from onnxruntime.capi import onnxruntime_pybind11_state as raised
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'rembg' needs the package {error.name}; "
                "run `pip install 'smi[images]'`"
            ) from error
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self.options.threads or default_threads()
        settings.enable_cpu_mem_arena = False  # kept, it is 200 MB between requests; it saves 0.1 s in each
        give_back_large()
        settings.log_severity_level = 3
        path = resolve(self.model)
        try:
            self.session = onnxruntime.InferenceSession(path, settings, providers=self._providers())
        except (raised.Fail, raised.InvalidGraph, raised.InvalidProtobuf, raised.NoSuchFile) as error:
            raise LoadFailed(f"model {self.model.name!r} cannot be loaded from {path}: {error}") from error
        (asked,) = self.session.get_inputs()
        if len(asked.shape) != 4 or not all(isinstance(side, int) for side in asked.shape[2:]):
            raise LoadFailed(
                f"model {self.model.name!r}: its input has shape {asked.shape}; "
                "rembg's have (1, 3, height, width)"
            )
        self.input, (self.height, self.width) = asked.name, asked.shape[2:]

    def _providers(self) -> list[str]:
        import onnxruntime

        there = onnxruntime.get_available_providers()
        device = self.options.device
        if device == "auto":
            device = "cuda" if "CUDAExecutionProvider" in there else "cpu"
        providers = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
        if providers.get(device) not in there:
            raise LoadFailed(
                f"model {self.model.name!r}: onnxruntime has no device {device!r} here; set option `device` "
                f"to one of: {', '.join(name for name in providers if providers[name] in there)}"
                " (cuda needs the package onnxruntime-gpu)"
            )
        return [providers[device]]

    def run(self, picture: Any, cancelled: threading.Event) -> Iterator[Working | Any]:
        import numpy
        from PIL import Image

        self.counters["calls"] += 1
        whole = Image.fromarray(picture)
        small = numpy.asarray(whole.resize((self.width, self.height), Image.Resampling.LANCZOS))
        with self.counting(cancelled):
            found = self._found(self._normalised(small), cancelled)
            if found is None:
                return
            low, high = found.min(), found.max()
            found = (found - low) / max(high - low, 1e-6)  # of one colour all over, a picture has no subject
            mask = Image.fromarray((found * 255).astype("uint8"))
            yield numpy.asarray(mask.resize(whole.size, Image.Resampling.LANCZOS))

    def _found(self, pixels: Any, cancelled: threading.Event) -> Any:
        """What the network makes of `pixels`: float32 (height, width); None if it is not wanted any more."""
        from onnxruntime.capi import onnxruntime_pybind11_state as raised

        try:
            with _ended_by(cancelled) as options:
                return self.session.run(None, {self.input: pixels}, options)[0][0, 0]
        except (raised.Fail, raised.RuntimeException, raised.EPFail) as error:
            if cancelled.is_set():
                return None
            detail = str(error)
            if "alloc" in detail:  # std::bad_alloc, and "Failed to allocate memory" on a GPU
                raise OutOfMemory(f"model {self.model.name!r}: no memory left for this picture") from None
            raise UpstreamFailed(f"model {self.model.name!r} failed; try again", detail=detail) from None

    def _normalised(self, small: Any) -> Any:
        """uint8 (height, width, 3) as float32 (1, 3, height, width), the brightest of it 1, normalised."""
        import numpy

        bright = small / max(small.max(), 1e-6)
        normal = (bright - numpy.array(self.options.mean)) / numpy.array(self.options.std)
        return normal.transpose(2, 0, 1)[None].astype(numpy.float32)


@contextmanager
def _ended_by(cancelled: threading.Event) -> Iterator[Any]:
    """Options of one call of onnxruntime, which ends soon after `cancelled` is set."""
    import onnxruntime

    options, over = onnxruntime.RunOptions(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if cancelled.is_set():
                options.terminate = True
                return

    options.terminate = cancelled.is_set()
    watcher = threading.Thread(target=watch, name="watcher", daemon=True)
    watcher.start()
    try:
        yield options
    finally:
        over.set()
        watcher.join()
