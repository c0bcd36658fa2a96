"""POST /v1/audio/speech, with the real voice; heard again by the real tiny.en."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import time
import wave
from typing import Any, get_args
from urllib.parse import urlsplit

import av
import httpx
import openai
import psutil
import pytest

from tasks.protocol.shapes import SoundFormat

SENTENCE = "The old library opens at nine in the morning, and the children wait outside the door."
LONG = f"{SENTENCE} " * 45
SIGNALLED_S = 0.1
PIECE_S = 0.9  # the piece at work is ended first: 0.1 s, and longer where others work as well
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def words(text: str) -> str:
    text = text.lower().replace("9 ", "nine ")
    return " ".join(re.sub(r"[^a-z ]", " ", text).split())


def seconds_of(sound: bytes) -> float:
    with av.open(io.BytesIO(sound)) as file:
        frames = list(file.decode(audio=0))
        return sum(frame.samples for frame in frames) / frames[0].sample_rate


@pytest.fixture(scope="module", autouse=True)
async def warm(smi: Any) -> None:
    """Both models are loaded before anything is timed."""
    async with httpx.AsyncClient(base_url=smi.url, timeout=60, trust_env=False) as http:
        body = {"model": "hibari", "input": "Ready."}
        answer = await http.post(
            "/v1/audio/speech", json=body, headers={"Authorization": f"Bearer {smi.key}"}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "wav"])
async def test_what_is_said_is_heard(client: openai.AsyncOpenAI, kind: SoundFormat) -> None:
    speech = await client.audio.speech.create(
        model="tts-1", voice="alloy", input=SENTENCE, response_format=kind
    )
    assert speech.response.headers["content-type"] == TYPES[kind]
    assert speech.response.headers["x-smi-model"] == "hibari"
    assert 4 < seconds_of(speech.content) < 7
    heard = await client.audio.transcriptions.create(
        model="whisper-1", file=(f"speech.{kind}", speech.content), response_format="text"
    )
    assert words(heard) == words(SENTENCE)


@pytest.mark.parametrize("kind", get_args(SoundFormat))
async def test_the_sound_is_streamed(client: openai.AsyncOpenAI, kind: SoundFormat) -> None:
    """The first bytes come long before the last, and the connection's own framing says where the end is."""
    begun = time.perf_counter()
    arrived: list[tuple[float, int]] = []
    async with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="nova", input=LONG[: len(LONG) // 3], response_format=kind
    ) as answer:
        assert answer.headers["content-type"] == TYPES[kind]
        async for piece in answer.iter_bytes():
            arrived.append((time.perf_counter() - begun, len(piece)))
    assert len(arrived) > 10
    assert arrived[0][0] < arrived[-1][0] / 2  # sent when it is whole, they would be nearly the same


async def test_as_events(http: httpx.AsyncClient) -> None:
    """OpenAI's `speech.audio.delta` and `speech.audio.done`."""
    body = {"model": "tts-1", "input": SENTENCE, "response_format": "wav", "stream_format": "sse"}
    answer = await http.post("/v1/audio/speech", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {"input_tokens": 85, "output_tokens": 0, "total_tokens": 85}
    whole = await http.post("/v1/audio/speech", json=body | {"stream_format": "audio"})
    sound = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert sound == whole.content
    assert seconds_of(sound) == pytest.approx(done["smi"]["seconds"], abs=0.001)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": "x" * 4097}, "input", "at most 4096 characters"),
        ({"input": "😀"}, "input", "nothing that could be said"),
        ({"input": f"{SENTENCE} Привет"}, "input", "CYRILLIC"),
        ({"voice": "bob"}, "voice", "it has: heart, alloy"),
        ({"voice": {"id": "voice_1"}}, "voice", "valid string"),
        ({"response_format": "midi"}, "response_format", "'wav' or 'pcm'"),
        ({"speed": 0.1}, "speed", "greater than or equal to 0.25"),
        ({"speed": 4}, "speed", "up to 2"),
        ({"stream_format": "chunks"}, "stream_format", "'audio' or 'sse'"),
        ({"instructions": "sadly"}, "instructions", "cannot be honoured"),
        ({"langage": "en"}, "langage", "not a parameter"),
        ({"model": "whisper-1"}, "model", "there are: hibari"),
        ({"model": ""}, "model", "at least 1 character"),
    ],
)
async def test_refused_by_name(http: httpx.AsyncClient, asked: dict[str, Any], param: str, said: str) -> None:
    body = {"model": "tts-1", "input": "Hello.", "voice": "alloy"} | asked
    answer = await http.post("/v1/audio/speech", json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]


async def test_neutral_values_pass(http: httpx.AsyncClient) -> None:
    body = {"model": "gpt-4o-mini-tts", "input": "Hello.", "instructions": "", "stream_format": "audio"}
    answer = await http.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_client_that_leaves_ends_it(smi: Any, node: Any) -> None:
    before = await node.counter("hibari", "cancelled")
    async with httpx.AsyncClient(base_url=smi.url, timeout=30, trust_env=False) as http:
        body = {"model": "tts-1", "input": LONG, "response_format": "aac"}
        headers = {"Authorization": f"Bearer {smi.key}"}
        async with http.stream("POST", "/v1/audio/speech", json=body, headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                break
            left = time.time()
    await node.reaches("hibari", cancelled=before + 1, timeout_s=5)
    assert await node.counter("hibari", "cancelled_at") - left < SIGNALLED_S + PIECE_S
    async with asyncio.timeout(2):
        while (await node.runner("hibari")).active:
            await asyncio.sleep(0.02)


async def test_a_slow_client_gets_all_of_it(http: httpx.AsyncClient) -> None:
    body = {"model": "tts-1", "input": LONG, "response_format": "pcm"}
    whole = (await http.post("/v1/audio/speech", json=body)).content
    slow = b""
    async with http.stream("POST", "/v1/audio/speech", json=body) as answer:
        async for piece in answer.aiter_bytes():
            if len(slow) < 1_000_000:
                await asyncio.sleep(0.05)
            slow += piece
    assert slow == whole


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_a_paused_player_holds_nobody_up(smi: Any, node: Any, stream_format: str) -> None:
    """The voice has one slot, and says all of it while the client takes nothing; the client gets it all."""
    body = {"model": "tts-1", "input": LONG, "response_format": "pcm", "stream_format": stream_format}
    parts, sent = urlsplit(smi.url), json.dumps(body).encode()
    with socket.socket() as paused:
        paused.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        paused.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(paused, (parts.hostname, parts.port))
        head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {smi.key}\r\n"
        head += f"Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
        await loop.sock_sendall(paused, head.encode() + sent)
        received = await loop.sock_recv(paused, 1)
        async with asyncio.timeout(20):
            while (await node.runner("hibari")).active:
                await asyncio.sleep(0.05)
        while data := await loop.sock_recv(paused, 1 << 20):
            received += data
    assert received.endswith(b"\r\n0\r\n\r\n")
    seconds = len(received) / 48_000 / (1 if stream_format == "audio" else 4 / 3)
    assert seconds > 200
    assert (b"speech.audio.done" in received) == (stream_format == "sse")


@pytest.mark.parametrize("as_events", [False, True])
async def test_a_sound_that_breaks_off_never_looks_whole(
    http: httpx.AsyncClient, node: Any, as_events: bool
) -> None:
    body = {"model": "tts-1", "input": LONG, "speed": 0.25, "response_format": "aac"}
    if as_events:
        body["stream_format"] = "sse"
    received = b""

    async def listen() -> None:
        nonlocal received
        async with http.stream("POST", "/v1/audio/speech", json=body) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_bytes():
                if not received:
                    psutil.Process((await node.runner("hibari")).pid).kill()
                received += piece

    if as_events:
        await listen()
        last = received.decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "runner_died"
        assert b"speech.audio.done" not in received
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            await listen()
    # Until the node has seen that its runner is gone, a request may still be sent there.
    async with asyncio.timeout(20):
        while (await http.post("/v1/audio/speech", json={"model": "tts-1", "input": "Hello."})).is_error:
            await asyncio.sleep(0.1)


async def test_as_a_job_its_wav_says_how_long_it_is(http: httpx.AsyncClient) -> None:
    request = {"input": SENTENCE, "response_format": "wav"}  # and the first model for it
    job = (
        (await http.post("/v1/jobs", json={"flow": "speak", "parameters": request})).raise_for_status().json()
    )
    async with asyncio.timeout(120):
        while job["status"] not in ("succeeded", "failed", "cancelled"):
            await asyncio.sleep(0.1)
            job = (await http.get(f"/v1/jobs/{job['id']}")).json()
    assert job["status"] == "succeeded", job
    result = (await http.get(f"/v1/jobs/{job['id']}/result")).raise_for_status().json()
    name = result["audio"]["name"]
    sound = (await http.get(f"/v1/jobs/{job['id']}/files/{name}")).raise_for_status()
    assert sound.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(sound.content)) as file:
        assert file.getnframes() == round(result["seconds"] * 24_000)
        assert len(file.readframes(file.getnframes())) == 2 * file.getnframes()
