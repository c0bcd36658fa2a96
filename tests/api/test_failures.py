from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import openai
import pytest

SLOW = {"model": "echo-slow", "messages": [{"role": "user", "content": "word " * 200}]}


async def stream(http: httpx.AsyncClient, body: dict[str, Any], after_first: Any = None) -> list[str]:
    lines: list[str] = []
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line and not lines and after_first is not None:
                after_first()
            lines += [line.removeprefix("data: ")] if line else []
    return lines


async def test_a_cut_stream_ends_in_done_as_if_whole(http: httpx.AsyncClient, node: Any) -> None:
    """kill -9 of the runner mid-stream: an error event, no [DONE]; the next request works."""
    warm = await http.post("/v1/chat/completions", json={**SLOW, "max_tokens": 1})
    assert warm.status_code == 200
    pid = (await node.runner("echo-slow")).pid
    lines = await stream(http, SLOW, lambda: os.kill(pid, signal.SIGKILL))
    assert "[DONE]" not in lines
    error = json.loads(lines[-1])["error"]
    assert error["code"] == "runner_died"
    assert error["type"] == "server_error"
    assert json.loads(lines[0])["choices"][0]["delta"]["content"] == "word"
    again = await http.post("/v1/chat/completions", json={**SLOW, "max_tokens": 1})
    assert again.status_code == 200, again.text
    assert (await node.runner("echo-slow")).pid != pid


async def test_the_client_library_sees_a_cut_stream(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="echo-crash", messages=[{"role": "user", "content": "well then crash now"}], stream=True
    )
    texts: list[str] = []

    async def read() -> None:
        async for chunk in answer:
            texts.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="ended while it worked"):
        await read()
    assert texts == ["well", " then"]


async def test_an_upstream_failure_comes_back_as_http_200_with_an_empty_answer(
    http: httpx.AsyncClient,
) -> None:
    """Before the first token a failure is a proper status, streamed or not."""
    for streamed in (False, True):
        response = await http.post(
            "/v1/chat/completions",
            json={
                "model": "echo-crash",
                "messages": [{"role": "user", "content": "crash"}],
                "stream": streamed,
            },
        )
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "runner_died"
        assert response.headers["content-type"] == "application/json"
