"""Headers are bounded; bodies are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from deployments.api.protocol import MAX_HEADERS

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OPEN = b"GET /health HTTP/1.1\r\nX-A: "
CHUNKED = b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def connection(smi: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(smi.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.transport.abort()


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """Status line and JSON of an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head.splitlines()[0], json.loads(await reader.readexactly(length))


async def flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    for _ in range(64):
        writer.write(data)
        await writer.drain()


@pytest.mark.parametrize("before", [b"", HEALTH])
async def test_too_large_headers_are_431(smi: Any, before: bytes) -> None:
    async with connection(smi) as (reader, writer):
        if before:
            writer.write(before)
            assert (await answered(reader))[0] == b"HTTP/1.1 200 OK"
        writer.write(OPEN.ljust(MAX_HEADERS + 1, b"a"))
        status, told = await answered(reader)
        assert b" 431 " in status
        assert told["error"]["code"] == "headers_too_large"
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "begun",
    [OPEN, b"GET /", HEALTH[:-2] + b"X-A: b\r\n", CHUNKED + b"0\r\nX-A: ", CHUNKED + b"1;"],
    ids=["header", "url", "headers", "trailer", "chunk extension"],
)
async def test_what_has_no_end_is_cut_off(smi: Any, begun: bytes) -> None:
    more = b"X-A: b\r\n" * 2**17 if begun.endswith(b"\r\n") else b"a" * 2**20
    async with connection(smi) as (_, writer):
        writer.write(begun)
        with pytest.raises(ConnectionError):
            await flood(writer, more)


async def test_large_headers_and_bodies_pass_on_one_connection(smi: Any) -> None:
    """Each message has the whole of the limit, whatever came before it."""
    header = b"GET /health HTTP/1.1\r\nX-A: ".ljust(MAX_HEADERS - 4, b"a") + b"\r\n\r\n"
    body = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {smi.key}\r\n".encode()
    body += b"Content-Length: %d\r\n\r\n" % (4 * MAX_HEADERS) + b" " * 4 * MAX_HEADERS
    async with connection(smi) as (reader, writer):
        for sent, status in ((header, b"200"), (header, b"200"), (body, b"400"), (header, b"200")):
            for start in range(0, len(sent), 20_000):
                writer.write(sent[start : start + 20_000])
                await asyncio.sleep(0.002)
            assert status in (await answered(reader))[0]
