"""A lean HTTP/1.1 load generator: kept connections, no client library in the figures."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Target:
    """Where chat completions are asked for, and how."""

    url: str
    body: dict[str, Any]
    key: str = ""

    def request(self, **more: Any) -> bytes:
        parts = urlsplit(self.url)
        content = json.dumps(self.body | more).encode()
        head = [
            f"POST {parts.path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join(head).encode() + b"\r\n\r\n" + content

    async def connect(self) -> Connection:
        parts = urlsplit(self.url)
        return Connection(*await asyncio.open_connection(parts.hostname, parts.port))


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    first: list[float] = field(default_factory=list)

    async def ask(self, request: bytes) -> float:
        """Send one request, read its whole answer; seconds to the body's first byte.

        Raises:
            RuntimeError: the answer is not 200, with what it says.
        """
        started = time.perf_counter()
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            first, body = await self._chunks(started)
        else:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            body = await self.reader.readexactly(length)
            first = time.perf_counter() - started
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {body[:300].decode()}")
        return first

    async def _chunks(self, started: float) -> tuple[float, bytes]:
        first, body = 0.0, b""
        while size := int(await self.reader.readline(), 16):
            body = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            if b"content" in body:
                first = first or time.perf_counter() - started
        await self.reader.readexactly(2)
        return first, body

    def close(self) -> None:
        self.writer.close()


async def one_by_one(target: Target, count: int) -> list[float]:
    """Milliseconds of `count` unary requests, one after another."""
    connection = await target.connect()
    request = target.request()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await connection.ask(request)
        times.append((time.perf_counter() - started) * 1000)
    connection.close()
    return times


async def together(
    target: Target, clients: int, seconds: float, **more: Any
) -> tuple[int, float, list[float]]:
    """Requests answered, seconds taken, and milliseconds to each first byte, by `clients` at once."""
    request = target.request(**more)
    end = time.perf_counter() + seconds

    async def client() -> list[float]:
        connection = await target.connect()
        firsts = []
        while time.perf_counter() < end:
            firsts.append(await connection.ask(request) * 1000)
        connection.close()
        return firsts

    started = time.perf_counter()
    firsts = [first for each in await asyncio.gather(*(client() for _ in range(clients))) for first in each]
    return len(firsts), time.perf_counter() - started, firsts


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)
