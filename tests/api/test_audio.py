from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

SPEECH = Path(__file__).parent.parent / "data" / "speech"
WAV = (SPEECH / "question.wav").read_bytes()
SAID = (SPEECH / "question.txt").read_text()


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


async def post(
    http: httpx.AsyncClient, file: Any = WAV, name: str = "a.wav", **fields: Any
) -> httpx.Response:
    return await http.post(
        "/v1/audio/transcriptions", files={"file": (name, file)}, data={"model": "whisper-1", **fields}
    )


async def test_json(client: openai.AsyncOpenAI) -> None:
    raw = await client.audio.transcriptions.with_raw_response.create(
        model="whisper-1", file=("a.wav", WAV), temperature=0, extra_headers={"x-request-id": "a-1"}
    )
    heard = raw.parse()
    assert words(heard.text) == words(SAID)
    assert heard.model_extra is not None
    assert heard.model_extra["smi"]["model"] == "whisper-tiny.en"
    assert raw.headers["x-request-id"] == "a-1"
    assert raw.headers["x-smi-tier"] == "local"


async def test_text(http: httpx.AsyncClient) -> None:
    response = await post(http, response_format="text", language="en")
    assert response.headers["content-type"].startswith("text/plain")
    assert words(response.text) == words(SAID)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (b"", "a.wav"),
        (b"this is a text, not a recording\n" * 20, "a.wav"),
        (WAV[:30], "a.wav"),
        (b"\x00" * 5000, "a.mp3"),
    ],
    ids=["0 bytes", "text named wav", "truncated", "zeros"],
)
async def test_empty_files_and_what_is_no_recording(http: httpx.AsyncClient, file: bytes, name: str) -> None:
    response = await post(http, file, name)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid_media"
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "srt"}, "response_format", "invalid_value"),
        ({"response_format": "verbose_json"}, "response_format", "invalid_value"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "unsupported_parameter"),
        ({"stream": "true"}, "stream", "unsupported_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"langage": "en"}, "langage", "unknown_parameter"),
        ({"model": ["whisper-1", "whisper-1"]}, "model", "invalid_value"),
        ({"model": ""}, "model", "invalid_value"),
    ],
)
async def test_bad_fields_are_named(http: httpx.AsyncClient, fields: Any, param: str, code: str) -> None:
    response = await post(http, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert repr(param) in error["message"]


async def test_a_model_of_another_kind(http: httpx.AsyncClient) -> None:
    for model in ("echo", "whisper-9"):
        response = await post(http, model=model)
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "whisper-tiny.en" in error["message"]


async def test_no_file(http: httpx.AsyncClient) -> None:
    for files in ({"model": (None, "whisper-1")}, {"model": (None, "whisper-1"), "file": (None, "text")}):
        response = await http.post("/v1/audio/transcriptions", files=files)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "file"


@pytest.mark.parametrize(
    ("content_type", "content"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=x", b"not a form"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b""),
    ],
)
async def test_no_form(http: httpx.AsyncClient, content_type: str, content: bytes) -> None:
    response = await http.post(
        "/v1/audio/transcriptions", content=content, headers={"content-type": content_type}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_upload_that_is_too_large_is_refused_at_once(smi: Any) -> None:
    """By its declared length, before it is sent."""
    import asyncio
    from urllib.parse import urlsplit

    parts = urlsplit(smi.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {smi.key}\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {2**30}\r\n\r\n"
    )
    writer.write(head.encode())
    async with asyncio.timeout(5):
        answer = await reader.readuntil(b"\r\n")
    writer.close()
    await writer.wait_closed()
    assert b" 413 " in answer


@pytest.mark.parametrize("charset", ["undefined", "utf-7", "unicode_escape", "punycode", "latin-1"])
@pytest.mark.parametrize("route", ["/v1/audio/transcriptions", "/v1/jobs"])
async def test_a_form_is_in_utf_8(http: httpx.AsyncClient, route: str, charset: str) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="flow"\r\n\r\n\\ud800+2AA-\r\n--x--\r\n'
    sent = {"content-type": f"multipart/form-data; charset={charset}; boundary=x"}
    response = await http.post(route, content=part, headers=sent)
    assert response.status_code == 400, response.text
    assert f"charset {charset!r}" in response.json()["error"]["message"]


async def test_a_form_may_say_that_it_is_in_utf_8(http: httpx.AsyncClient) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="langage"\r\n\r\nen\r\n--x--\r\n'
    sent = {"content-type": 'multipart/form-data; charset="UTF-8"; boundary=x'}
    response = await http.post("/v1/audio/transcriptions", content=part, headers=sent)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "langage")
