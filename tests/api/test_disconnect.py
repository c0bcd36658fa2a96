"""A client that leaves is signalled to the driver within 100 ms."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

SIGNALLED_S = 0.1
LONG = "word " * 400  # 20 s at 20 words a second


async def leave(smi: Any, body: bytes, content_type: str, path: str, until: Any) -> float:
    """Send a request, wait for `until`, close the connection; when that was (Unix time)."""
    parts = urlsplit(smi.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {smi.key}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    await until
    left = time.time()
    writer.close()
    await writer.wait_closed()
    return left


def chat(model: str, **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": LONG}], **more}).encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_gone_and_the_gpu_goes_on(smi: Any, node: Any, stream: bool) -> None:
    """litellm#37140, claude-code-proxy#114: unary and streamed, no middleware hides the disconnect."""
    before = await node.counter("echo-slow", "cancelled")
    calls = await node.counter("echo-slow", "calls")
    left = await leave(
        smi,
        chat("echo-slow", stream=stream),
        "application/json",
        "/v1/chat/completions",
        node.reaches("echo-slow", calls=calls + 1),
    )
    await node.reaches("echo-slow", cancelled=before + 1, timeout_s=5)
    assert await node.counter("echo-slow", "cancelled_at") - left < SIGNALLED_S
    runner = await node.runner("echo-slow")
    assert runner.active == 0


async def test_a_client_that_leaves_while_queued_never_reaches_the_driver(smi: Any, node: Any) -> None:
    path, kind = "/v1/chat/completions", "application/json"
    calls = await node.counter("echo-single", "calls")
    leaves = asyncio.Event()
    first = asyncio.create_task(leave(smi, chat("echo-single"), kind, path, leaves.wait()))
    await node.reaches("echo-single", calls=calls + 1)
    await leave(smi, chat("echo-single"), kind, path, node.reaches("echo-single", queued=1))
    async with asyncio.timeout(SIGNALLED_S * 3):  # the state is told 20 times a second
        while (await node.runner("echo-single")).queued:
            await asyncio.sleep(0.01)
    leaves.set()
    await first
    async with asyncio.timeout(2):
        while (await node.runner("echo-single")).active:
            await asyncio.sleep(0.02)
    assert await node.counter("echo-single", "calls") == calls + 1


async def test_a_transcription_is_stopped_when_its_client_leaves(
    smi: Any, node: Any, http: httpx.AsyncClient
) -> None:
    model = "whisper-tiny.en"
    short = (Path(__file__).parent.parent / "data" / "speech" / "question.wav").read_bytes()
    warm = await http.post("/v1/audio/transcriptions", files={"file": short}, data={"model": model})
    assert warm.status_code == 200, warm.text
    calls = await node.counter(model, "calls")
    cancelled = await node.counter(model, "cancelled")
    request = httpx.Request("POST", "http://x", files={"file": longer(short, 40)}, data={"model": model})
    request.read()
    await leave(
        smi,
        request.content,
        request.headers["content-type"],
        "/v1/audio/transcriptions",
        node.reaches(model, calls=calls + 1),
    )
    await node.reaches(model, cancelled=cancelled + 1, timeout_s=10)
    async with asyncio.timeout(5):
        while (await node.runner(model)).active:
            await asyncio.sleep(0.02)


def longer(wav: bytes, times: int) -> bytes:
    """The recording, said `times` times."""
    import io
    import wave

    with wave.open(io.BytesIO(wav)) as source:
        frames, parameters = source.readframes(source.getnframes()), source.getparams()
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setparams(parameters)
        target.writeframes(frames * times)
    return file.getvalue()
