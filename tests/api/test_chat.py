from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

USER = {"role": "user", "content": "one two three"}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [USER], **more}


async def events(http: httpx.AsyncClient, **more: Any) -> tuple[httpx.Response, list[str]]:
    async with http.stream("POST", "/v1/chat/completions", json=ask(stream=True, **more)) as response:
        text = (await response.aread()).decode()
    return response, [event.removeprefix("data: ") for event in text.split("\n\n") if event]


async def test_unary_answer(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="echo",
        messages=[{"role": "user", "content": "one two three"}],
        extra_headers={"x-request-id": "u-1"},
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        3,
        6,
    )
    assert answer.id == "chatcmpl-u-1"
    assert answer.model == "echo"
    assert abs(answer.created - time.time()) < 60
    assert answer.model_extra is not None
    origin = answer.model_extra["smi"]
    assert origin["tier"] == "local"
    assert origin["model"] == "echo"
    assert origin["request_id"] == "u-1"
    assert origin["node"].startswith("127.0.0.1:")
    assert raw.headers["x-request-id"] == "u-1"
    assert raw.headers["x-smi-tier"] == "local"
    assert raw.headers["x-smi-model"] == "echo"


async def test_an_answer_from_outside_says_so(http: httpx.AsyncClient, prefect: httpx.AsyncClient) -> None:
    name = f"outside-{time.time_ns()}"
    request = ask(model="echo-outside")
    answer = await http.post("/v1/chat/completions", json=request, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-smi-tier"] == "cloud"
    assert answer.json()["smi"]["tier"] == "cloud"
    asked = {"flow_runs": {"tags": {"all_": [name]}}}
    async with asyncio.timeout(40):
        while not (runs := (await prefect.post("/flow_runs/filter", json=asked)).json()) or (
            runs[0]["state_type"] != "COMPLETED"
        ):
            await asyncio.sleep(0.1)
    assert "tier:cloud" in runs[0]["tags"]
    assert runs[0]["labels"]["tier"] == "cloud"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_is_passed_on(http: httpx.AsyncClient, name: str) -> None:
    answer = (await http.post("/v1/chat/completions", json=ask(**{name: 2}))).json()
    assert answer["choices"][0]["message"]["content"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stop", [" two", ["nine", " two"]])
async def test_stop_is_passed_on(http: httpx.AsyncClient, stop: Any) -> None:
    answer = (await http.post("/v1/chat/completions", json=ask(stop=stop))).json()
    assert answer["choices"][0]["message"]["content"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    _, sent = await events(http, stop=stop)
    assert "".join(delta(event) for event in sent[:-1]) == "one"


def delta(event: str) -> str:
    choices = json.loads(event)["choices"]
    return str(choices[0]["delta"].get("content", "")) if choices else ""


async def test_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "größer 🌍 3"}],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "größer 🌍"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_proxy_buffers_sse(http: httpx.AsyncClient) -> None:
    response, sent = await events(http)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["x-smi-model"] == "echo"
    assert sent[-1] == "[DONE]"
    assert json.loads(sent[0])["smi"]["model"] == "echo"
    assert "usage" not in json.loads(sent[0])


async def test_tokens_come_one_by_one(http: httpx.AsyncClient) -> None:
    times = []
    body = ask(model="echo-slow", messages=[{"role": "user", "content": "a b c d e f"}], stream=True)
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if delta_of_line(line):
                times.append(time.monotonic())
    assert len(times) == 6
    assert times[-1] - times[0] > 0.2  # 20 a second


def delta_of_line(line: str) -> str:
    return delta(line.removeprefix("data: ")) if line.startswith("data: {") else ""


async def test_an_answer_may_be_sent_back(http: httpx.AsyncClient) -> None:
    """An openai client's `message.model_dump()` carries empty fields that mean nothing."""
    first = (await http.post("/v1/chat/completions", json=ask())).json()["choices"][0]["message"]
    earlier = {**first, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    response = await http.post("/v1/chat/completions", json=ask(messages=[USER, earlier, USER]))
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == 9


async def test_text_parts(http: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    response = await http.post(
        "/v1/chat/completions", json=ask(messages=[{"role": "user", "content": parts}])
    )
    assert response.json()["choices"][0]["message"]["content"] == "one\ntwo"


async def test_neutral_values_are_accepted(http: httpx.AsyncClient) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": None,
        "logit_bias": {},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "n": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "stream": False,
        "stream_options": None,
        "stop": None,
        "seed": -1,
    }
    response = await http.post("/v1/chat/completions", json=ask(**neutral))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("service_tier", "priority"),
        ("store", True),
        ("reasoning_effort", "high"),
        ("functions", [{"name": "f"}]),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.AsyncClient, name: str, value: Any
) -> None:
    response = await http.post("/v1/chat/completions", json=ask(**{name: value}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name
    assert error["message"] == f"{name!r} cannot be honoured by this server yet; leave it out"


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"messages": [{**USER, "nam": "x"}]}, "messages[0].nam", "unknown_parameter"),
        (
            {"messages": [USER, {**USER, "tool_calls": [{}]}]},
            "messages[1].tool_calls",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "invalid_value",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": float("nan")}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"n": 2}, "n", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"model": ""}, "model", "invalid_value"),
        ({"model": 5}, "model", "invalid_value"),
    ],
)
async def test_bad_values_are_named(http: httpx.AsyncClient, change: Any, param: str, code: str) -> None:
    response = await http.post(
        "/v1/chat/completions",
        content=json.dumps({**ask(), **change}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert repr(param) in error["message"]
    assert "pydantic" not in error["message"]


async def test_a_misspelt_parameter_is_met_with_the_right_one(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=ask(temprature=1))
    assert "did you mean 'temperature'?" in response.json()["error"]["message"]


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_missing_parameters_are_named(http: httpx.AsyncClient, missing: str) -> None:
    body = {name: value for name, value in ask().items() if name != missing}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{missing!r} is missing")


@pytest.mark.parametrize(
    "content",
    [b"", b"  ", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b"\x00"],
)
async def test_a_body_that_is_no_json_object(http: httpx.AsyncClient, content: bytes) -> None:
    response = await http.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]


async def test_a_body_that_is_too_large(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", content=b"x" * (33 * 2**20))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model(client: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": "x"}], stream=stream
        )
    assert caught.value.code == "model_not_found"
    assert "echo" in str(caught.value)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="whisper-1", messages=[{"role": "user", "content": "x"}])
    assert "transcription" in str(caught.value)


async def test_many_messages_do_not_block_the_others(http: httpx.AsyncClient) -> None:
    messages = b",".join([b'{"role":"user","content":"","refusal":null}'] * 600_000)
    body = b'{"model":"echo","messages":[%b]}' % messages
    begun = time.monotonic()
    json.loads(body)
    bare = time.monotonic() - begun
    large = asyncio.create_task(http.post("/v1/chat/completions", content=body))
    longest = 0.0
    while not large.done():
        begun = time.monotonic()
        assert (await http.get("/health")).status_code == 200
        longest = max(longest, time.monotonic() - begun)
    response = await large
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "at most 4096" in response.json()["error"]["message"]
    assert longest < 15 * bare  # this process is the client, too


async def test_long_names_are_not_looked_up_and_not_repeated(http: httpx.AsyncClient) -> None:
    name = "temperature" * 100_000
    for body in (ask(**{name: 1}), ask(stream=True, stream_options={name: 1})):
        response = await http.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unknown_parameter")
        assert len(error["message"]) < 200
        assert len(error["param"]) < 100


@pytest.mark.parametrize("kind", [{"a": "SECRET"}, ["SECRET"], "SECRET" * 20])
async def test_what_a_client_sent_as_a_type_is_not_repeated(http: httpx.AsyncClient, kind: Any) -> None:
    message = {"role": "user", "content": [{"type": kind}]}
    response = await http.post("/v1/chat/completions", json=ask(messages=[message]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content")
    assert "SECRET" not in response.text
