"""Headers are bounded, bodies are not; a client that takes nothing is broken off."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from deployments.api.protocol import MAX_HEADERS, BoundedProtocol

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


class Impatient(BoundedProtocol):
    stalled_s = 0.4


class Endless:
    """An application that sends `size` bytes, and notes when its client has left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for _ in range(self.size // 65536):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            if leaving.done():
                self.left.set()
                return
        await send({"type": "http.response.body", "body": b""})
        leaving.cancel()


@asynccontextmanager
async def reading(app: Endless) -> AsyncIterator[tuple[asyncio.AbstractEventLoop, socket.socket]]:
    """A connection to `app` that has asked, and has read nothing."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=Impatient, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.setblocking(False)
        await loop.sock_connect(client, server.servers[0].sockets[0].getsockname())
        await loop.sock_sendall(client, HEALTH)
        async with asyncio.timeout(20):
            yield loop, client
    server.should_exit = True
    await serving


async def test_a_client_that_takes_nothing_is_broken_off() -> None:
    app = Endless(1 << 30)
    async with reading(app) as (loop, client):
        await app.left.wait()
        got = b""
        while data := await loop.sock_recv(client, 1 << 20):
            got = data
        assert not got.endswith(b"\r\n0\r\n\r\n")  # as a whole answer would


async def test_a_client_that_is_only_slow_gets_all_of_it() -> None:
    app = Endless(12 << 20)
    got, begun = 0, asyncio.get_running_loop().time()
    async with reading(app) as (loop, client):
        while data := await loop.sock_recv(client, 65536):
            got += len(data)
            await asyncio.sleep(0.01)
        assert loop.time() - begun > 2 * Impatient.stalled_s
    assert got > app.size
    assert not app.left.is_set()
