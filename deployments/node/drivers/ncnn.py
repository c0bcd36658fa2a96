"""Weights out of ncnn's files: `NAME.param` (the graph, as text) beside `NAME.bin` (its numbers).

Read are graphs of convolutions and PReLUs, in their order: enough for networks that are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HALF = 0x01306B47  # in front of half-precision numbers; 0 is in front of single ones
Layer = dict[str, "torch.Tensor"]


def read_layers(graph: str, numbers: bytes) -> Iterator[Layer]:
    """`weight`, and `bias` where there is one, of each Convolution (4 axes) and PReLU (1 axis).

    Raises:
        ValueError: the two do not belong together, or are of a form that is not known.
    """
    import torch

    reader = _Reader(numbers)
    for line in graph.splitlines()[2:]:
        kind, _name, inputs, outputs, *rest = line.split()
        options = dict(item.split("=") for item in rest[int(inputs) + int(outputs) :])
        if kind == "PReLU":
            yield {"weight": torch.from_numpy(reader.take(int(options["0"])))}
        elif kind == "Convolution":
            channels, size, count = int(options["0"]), int(options["1"]), int(options["6"])
            weight = reader.take(count, half=reader.is_half())
            layer = {"weight": torch.from_numpy(weight.reshape(channels, -1, size, size))}
            if options.get("5") == "1":
                layer["bias"] = torch.from_numpy(reader.take(channels))
            yield layer
    if reader.offset != len(numbers):
        raise ValueError(f"its graph names {reader.offset} bytes of numbers, there are {len(numbers)}")


class _Reader:
    def __init__(self, numbers: bytes) -> None:
        self._numbers = numbers
        self.offset = 0

    def take(self, count: int, half: bool = False) -> Any:
        """The next `count` numbers as float32."""
        import numpy

        kind = numpy.float16 if half else numpy.float32
        values = numpy.frombuffer(self._numbers, kind, count, self.offset)
        self.offset += -(-values.nbytes // 4) * 4  # padded to 4 bytes
        return values.astype(numpy.float32)

    def is_half(self) -> bool:
        flag = int.from_bytes(self._numbers[self.offset : self.offset + 4], "little")
        if flag not in (0, HALF):
            raise ValueError(f"numbers of form {flag:#x} at byte {self.offset} are not known")
        self.offset += 4
        return flag == HALF
