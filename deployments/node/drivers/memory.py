"""How this process deals with memory that it no longer needs."""

from __future__ import annotations

import ctypes
import sys

LARGE = 1 << 20
M_MMAP_THRESHOLD = -3  # malloc.h


def give_back_large() -> None:
    """From now on, blocks of 1 MiB and more go back to the system as they are freed.

    glibc raises its own threshold as it sees large blocks, up to 32 MiB, and then keeps the pictures of
    one request beside those of the next: half as much again (measured). Elsewhere this does nothing.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
