"""The two networks of Real-ESRGAN (https://github.com/xinntao/Real-ESRGAN) in plain torch.

Both make pictures four times as large. Their weights have the names that the original checkpoints have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from deployments.node.drivers.ncnn import Layer

SCALE = 4
WIDTH, GROWTH = 64, 32  # channels of `RRDBNet`
HEAD_REACH = 2  # pixels that `RRDBNet`'s last four convolutions look beyond each
Look = Callable[[], None]


class Network(nn.Module):
    """From (1, 3, height, width), 0 to 1, to four times as much, without the rim.

    Attributes:
        reach: pixels beyond its own that a pixel depends on: the rim that a tile needs.
    """

    reach: int

    @abstractmethod
    def forward(self, picture: Tensor, rim: Rim, look: Look) -> Tensor:
        """`look` is called between layers, and may raise."""


class Rim(tuple[int, int, int, int]):
    """Pixels at top, bottom, left and right that are only there to be looked at."""

    def cut(self, picture: Tensor, scale: int = 1, keep: int = 0) -> Tensor:
        """`picture`, `scale` times as large as the rim says, without the rim but for `keep` pixels of it."""
        top, bottom, left, right = (max(0, side - keep) * scale for side in self)
        height, width = picture.shape[-2:]
        return picture[..., top : height - bottom, left : width - right]

    def kept(self, keep: int) -> Rim:
        return Rim(min(side, keep) for side in self)


class SRVGGNetCompact(Network):
    """Convolutions one after the other: small and fast, a little smooth."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.body = nn.ModuleList(_layer(layer["weight"]) for layer in layers)
        self.reach = sum(isinstance(layer, nn.Conv2d) for layer in self.body)
        self.load_state_dict(
            {
                f"body.{at}.{part}": values
                for at, layer in enumerate(layers)
                for part, values in layer.items()
            },
            assign=True,
        )

    def forward(self, picture: Tensor, rim: Rim, look: Look) -> Tensor:
        features = picture
        for layer in self.body:
            look()
            features = layer(features)
        base = functional.interpolate(rim.cut(picture), scale_factor=SCALE, mode="nearest")
        return base + functional.pixel_shuffle(rim.cut(features), SCALE)


def _layer(weight: Tensor) -> nn.Module:
    if weight.ndim == 1:
        return nn.PReLU(len(weight))
    return nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], padding="same")


class _DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = [f"conv{at}" for at in range(1, 6)]
        for at, name in enumerate(self.convs):
            out = WIDTH if at == 4 else GROWTH
            self.add_module(name, nn.Conv2d(WIDTH + at * GROWTH, out, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        parts = [features]
        for name in self.convs[:-1]:
            parts.append(_leaky(self.get_submodule(name)(torch.cat(parts, 1))))
        last: Tensor = self.get_submodule(self.convs[-1])(torch.cat(parts, 1))
        return last.mul_(0.2).add_(features)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = _DenseBlock(), _DenseBlock(), _DenseBlock()

    def forward(self, features: Tensor, look: Look) -> Tensor:
        inner = features
        for part in (self.rdb1, self.rdb2, self.rdb3):
            look()
            inner = part(inner)
        return inner.mul_(0.2).add_(features)


class RRDBNet(Network):
    """Blocks of densely joined convolutions: large and slow, with more of a photograph's texture."""

    # It looks further, but what lies beyond this changes a pixel by about 1/255 at most (measured: tests).
    reach = 48

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        blocks = (len(layers) - 6) // 15
        self.conv_first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.ModuleList(_Block() for _ in range(blocks))
        self.conv_body, self.conv_up1, self.conv_up2, self.conv_hr = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4)
        )
        self.conv_last = nn.Conv2d(WIDTH, 3, 3, padding=1)
        inner = [f"body.{i}.rdb{j}.conv{k}" for i in range(blocks) for j in (1, 2, 3) for k in range(1, 6)]
        names = ["conv_first", *inner, "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"]
        if len(names) != len(layers):
            raise ValueError(f"it has {len(layers)} layers; RRDBNet has 15 a block, and 6")
        pairs = zip(names, layers, strict=True)
        self.load_state_dict(
            {f"{name}.{part}": values for name, layer in pairs for part, values in layer.items()},
            assign=True,
        )

    def forward(self, picture: Tensor, rim: Rim, look: Look) -> Tensor:
        first = self.conv_first(picture)
        features = first
        for block in self.body:
            features = block(features, look)
        features = rim.cut(first + self.conv_body(features), keep=HEAD_REACH)
        for up in (self.conv_up1, self.conv_up2):
            look()
            features = _leaky(up(functional.interpolate(features, scale_factor=2, mode="nearest")))
        look()
        features = _leaky(self.conv_hr(features))
        look()
        return rim.kept(HEAD_REACH).cut(self.conv_last(features), SCALE)


def _leaky(features: Tensor) -> Tensor:
    return functional.leaky_relu(features, 0.2, inplace=True)


def network_of(layers: Sequence[Layer]) -> Network:
    """The network that `layers` are the weights of, in eval mode. Raises `ValueError` if it is neither."""
    if not layers:
        raise ValueError("it has no layers that are known")
    compact = any(layer["weight"].ndim == 1 for layer in layers)
    try:
        with torch.device("meta"):  # no memory and no random numbers for weights that come at once
            network = SRVGGNetCompact(layers) if compact else RRDBNet(layers)
        return network.eval().requires_grad_(False)
    except RuntimeError as error:  # what `load_state_dict` raises
        raise ValueError("its layers are neither SRVGGNetCompact's nor RRDBNet's") from error
