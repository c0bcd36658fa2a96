"""deployments/node/drivers/openai.py against a real HTTP server that can misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from blocks.catalogue import Model
from blocks.errors import (
    Busy,
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    LoadFailed,
    SmiError,
    Unavailable,
    UpstreamFailed,
)
from deployments.node.adapters.chat import ChatAdapter
from deployments.node.drivers.base import End, Piece
from deployments.node.drivers.openai import OpenAIDriver, retry_after
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import ChatParameters, ChatResult

KEY = "sk-test-7"
WORDS = ["Hello", ", ", "wörld", " 🙂"]


class Engine:
    """An OpenAI-compatible engine. The last user message says how it is to behave."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error(401, "no such key")
        return JSONResponse({"data": [{"id": "llama3:latest"}, {"id": "qwen"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        how = body["messages"][-1]["content"]
        match how:
            case "429":
                return error(429, "slow down", {"retry-after": "7"})
            case "503":
                return error(503, "loading", {"retry-after": "3"})
            case "500" | "401" | "404" | "400":
                return error(int(how), "it failed")
            case "overflow":
                return error(400, "This model's maximum context length is 10 tokens, not 12.")
            case "page":
                return Response("<html>hello</html>", media_type="text/html")
            case "prefill":
                await self.until_left(request)
        return StreamingResponse(self.stream(how, request), media_type="text/event-stream")

    async def stream(self, how: str, request: Request) -> AsyncIterator[str]:
        for word in WORDS:
            yield event({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
        if how == "cut":
            return
        if how == "break":
            raise ConnectionResetError
        if how == "error":
            yield event({"error": {"message": "out of memory", "code": 500}})
            return
        if how == "garbage":
            yield "data: {half\n\n"
            return
        if how == "endless":
            await self.until_left(request)
        reason = "length" if how == "length" else "stop"
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if how != "no usage":
            usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
            yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def until_left(self, request: Request) -> None:
        """Starlette may see the disconnect first, and then cancels us."""
        try:
            async with asyncio.timeout(10):
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)
            self.left.set()
        except asyncio.CancelledError:
            self.left.set()
            raise


def event(chunk: dict[str, Any]) -> str:
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"} | chunk
    return f"data: {json.dumps(whole)}\n\n"


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Engine, str]]:
    engine = Engine()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(engine.app, log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


def model(url: str, **options: Any) -> Model:
    return Model(name="llama3", task="chat", driver="openai", source=url, options=options)


@pytest.fixture(scope="module")
async def driver(engine: tuple[Engine, str]) -> AsyncIterator[OpenAIDriver]:
    driver = OpenAIDriver(model(engine[1], api_key_env="SMI_TEST_ENGINE_KEY"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMI_TEST_ENGINE_KEY", KEY)
        await asyncio.to_thread(driver.load)
    yield driver
    await driver._client.close()


async def no_media() -> AsyncIterator[bytes]:
    return
    yield b""


async def chat(driver: OpenAIDriver, how: str, **fields: Any) -> tuple[str, Done]:
    parameters = ChatParameters.model_validate({"messages": [{"role": "user", "content": how}], **fields})
    done = await ChatAdapter(driver).run(parameters, no_media(), None)
    return ChatResult.model_validate_json(done.result).text, done


async def test_an_answer_with_the_engines_own_usage(driver: OpenAIDriver) -> None:
    """litellm#35290: usage missing or wrong in streams."""
    text, done = await chat(driver, "hello")
    assert text == "".join(WORDS)
    assert done.finish_reason == "stop"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (11, 5)


async def test_usage_is_counted_where_the_engine_gives_none(driver: OpenAIDriver) -> None:
    _, done = await chat(driver, "no usage")
    assert done.usage.completion_tokens == len(WORDS)


async def test_the_finish_reason_is_passed_on(driver: OpenAIDriver) -> None:
    assert (await chat(driver, "length"))[1].finish_reason == "length"


async def test_every_parameter_is_passed_on(driver: OpenAIDriver, engine: tuple[Engine, str]) -> None:
    """litellm#20711, ollama#17183: stop sequences and max_tokens not passed on."""
    given = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.8, "seed": 4, "stop": ["\n\n"]}
    await chat(driver, "hello", **given)
    sent = engine[0].requests[-1]
    assert {name: sent[name] for name in given} == given
    assert sent["model"] == "llama3"
    assert sent["stream_options"] == {"include_usage": True}
    await chat(driver, "hello")
    assert engine[0].requests[-1].keys() == {"model", "messages", "stream", "stream_options"}


@pytest.mark.parametrize("how", ["cut", "break", "error", "garbage", "page"])
async def test_a_cut_stream_is_never_a_whole_answer(driver: OpenAIDriver, how: str) -> None:
    with pytest.raises(UpstreamFailed, match="engine of model 'llama3' at http://127"):
        await chat(driver, how)


@pytest.mark.parametrize(
    ("how", "kind", "wait"),
    [
        ("429", Busy, 7),
        ("503", Unavailable, 3),
        ("500", UpstreamFailed, None),
        ("400", InvalidRequest, None),
        ("401", ConfigurationError, None),
        ("404", ConfigurationError, None),
        ("overflow", ContextLengthExceeded, None),
    ],
)
async def test_failures_keep_their_kind_and_retry_after(
    driver: OpenAIDriver, engine: tuple[Engine, str], how: str, kind: type[SmiError], wait: float | None
) -> None:
    """litellm#41261, voidllm#184: Retry-After ignored, retries with no delay."""
    before = len(engine[0].requests)
    with pytest.raises(SmiError) as caught:
        await chat(driver, how)
    assert type(caught.value) is kind
    assert caught.value.retry_after == wait
    assert len(engine[0].requests) == before + 1, "not tried again behind our back"
    assert KEY not in caught.value.whole
    if how == "overflow":  # what the engine says may quote the request: for the user, not for records
        assert "10 tokens" in caught.value.detail
        assert "10 tokens" not in caught.value.message


@pytest.mark.parametrize("how", ["prefill", "endless"])
async def test_who_leaves_is_told_to_the_engine(
    driver: OpenAIDriver, engine: tuple[Engine, str], how: str
) -> None:
    """litellm#37140."""
    engine[0].left.clear()
    cancelled, sent = driver.counters["cancelled"], len(engine[0].requests)
    task = asyncio.create_task(chat(driver, how))
    while len(engine[0].requests) == sent:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    start = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine[0].left.wait, 2)
    assert time.monotonic() - start < 0.5
    assert driver.counters["cancelled"] == cancelled + 1


async def test_answers_run_at_once(driver: OpenAIDriver) -> None:
    answers = await asyncio.gather(*(chat(driver, "hello") for _ in range(20)))
    assert {text for text, _ in answers} == {"".join(WORDS)}


async def test_pieces_come_as_they_are_made(driver: OpenAIDriver) -> None:
    parameters = ChatParameters.model_validate({"messages": [{"role": "developer", "content": "hello"}]})
    items = [item async for item in driver.run(parameters, threading.Event())]
    assert items == [*(Piece(word) for word in WORDS), End("stop", 11, 5)]


async def test_the_engine_is_gone(engine: tuple[Engine, str], driver: OpenAIDriver) -> None:
    gone = OpenAIDriver(driver.model)
    gone.options, gone._name, gone._what = driver.options, "llama3", "the engine"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone._url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        gone._client = gone._connect(KEY)
        with pytest.raises(Unavailable, match="cannot be reached") as caught:
            await chat(gone, "hello")
    assert caught.value.retry_after
    await gone._client.close()


def test_loading_says_what_is_wrong(engine: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = engine[1]
    monkeypatch.setenv("GOOD", KEY)
    monkeypatch.setenv("BAD", "wrong")
    cases = [
        (model("package:x/y"), "is no URL; give the server's base"),
        (model("http://127.0.0.1:9/v1"), "http://127.0.0.1:9/v1 does not answer"),
        (model(url), "refuses the key: set option `api_key_env`"),
        (model(url, api_key_env="BAD"), "refuses the key"),
        (model(url, api_key_env="NO_SUCH_VARIABLE"), "names NO_SUCH_VARIABLE, which is not set"),
        (model(url, api_key_env="GOOD", model="gpt-9"), "no model 'gpt-9'.*one of: llama3:latest, qwen"),
        (model(url.removesuffix("/v1"), api_key_env="GOOD"), r"answers 404.*most end in /v1"),
        (model(url, key="x"), "option 'key'.*options are: model, api_key_env"),
    ]
    for wrong, message in cases:
        with pytest.raises(LoadFailed, match=message) as caught:
            OpenAIDriver(wrong).load()
        assert KEY not in caught.value.message


def test_retry_after_is_seconds_or_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert 25 < (retry_after({"retry-after": soon}) or 0) <= 30
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None
