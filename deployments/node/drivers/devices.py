"""Where torch computes, and what is said when there is no memory left there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blocks.errors import OutOfMemory
from deployments.node.drivers.options import default_threads


def torch_device(asked: str, threads: int | None) -> str:
    """The device that is meant by `asked`; `auto` is cuda where there is one.

    Args:
        threads: of the CPU, for all of this process; None is half of the cores.
    """
    import torch

    torch.set_num_threads(threads or default_threads())
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


@contextmanager
def memory_told(message: str) -> Iterator[None]:
    """Within it, torch's out-of-memory error becomes `OutOfMemory` with `message`."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemory(message) from None
