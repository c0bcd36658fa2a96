"""deployments/node/adapters/upload.py: a request's bytes in a file."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import pytest

from blocks.errors import InvalidMedia, PayloadTooLarge
from deployments.node.adapters.upload import spool


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_all_of_it_is_there_from_the_start() -> None:
    file = io.BytesIO()
    await spool(chunks(b"ab", b"", b"c"), file, 3, "recording")
    assert file.read() == b"abc"


@pytest.mark.parametrize("parts", [(), (b"", b"")])
async def test_nothing_is_refused_whatever_it_should_be(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidMedia, match=r"the recording is empty \(0 bytes\)") as refused:
        await spool(chunks(*parts), io.BytesIO(), 3, "recording")
    assert refused.value.param == "file"


async def test_too_much_is_refused() -> None:
    with pytest.raises(PayloadTooLarge, match="the picture is larger than 1 MiB"):
        await spool(chunks(bytes(1 << 20), b"x"), io.BytesIO(), 1 << 20, "picture")
