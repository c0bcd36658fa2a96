from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import httpx
import openai
import pytest

MODEL = "all-minilm-l6-v2"
TEXTS = ["A cat sits on the mat.", "The kitten is resting on a rug.", "Interest rates rose by half a point."]


def likeness(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def post(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await http.post("/v1/embeddings", json={"model": MODEL, "input": TEXTS, **body})


async def test_openais_client(client: openai.AsyncOpenAI) -> None:
    raw = await client.embeddings.with_raw_response.create(
        model="text-embedding-3-small", input=TEXTS, user="me", extra_headers={"x-request-id": "e-1"}
    )
    sent = json.loads(raw.http_response.request.content)
    assert sent["encoding_format"] == "base64"  # what it asks for by itself
    made = raw.parse()
    assert (made.object, made.model) == ("list", MODEL)
    assert [(one.object, one.index, len(one.embedding)) for one in made.data] == [
        ("embedding", index, 384) for index in range(3)
    ]
    assert made.usage.prompt_tokens == made.usage.total_tokens == 29
    one, alike, other = (one.embedding for one in made.data)
    assert abs(likeness(one, one) - 1) < 1e-5
    assert likeness(one, alike) > 0.5 > 0.2 > likeness(one, other)
    assert made.model_extra is not None
    assert made.model_extra["smi"]["model"] == MODEL
    assert raw.headers["x-request-id"] == made.model_extra["smi"]["request_id"] == "e-1"
    assert raw.headers["x-smi-tier"] == "local"


async def test_numbers_and_base64_are_the_same_vectors(http: httpx.AsyncClient) -> None:
    many = [f"text number {number}" for number in range(150)]
    numbers, default, encoded = [
        (await post(http, input=many, **more)).json()["data"]
        for more in ({"encoding_format": "float"}, {}, {"encoding_format": "base64"})
    ]
    assert [one["index"] for one in numbers] == list(range(150))
    for one, same, in_base64 in zip(numbers, default, encoded, strict=True):
        raw = base64.b64decode(in_base64["embedding"])
        assert list(struct.unpack("<384f", raw)) == pytest.approx(one["embedding"], abs=1e-6)
        assert same["embedding"] == pytest.approx(one["embedding"], abs=1e-6)


async def test_one_text_alone(http: httpx.AsyncClient) -> None:
    alone = (await post(http, input=TEXTS[0], dimensions=384)).json()
    assert [one["index"] for one in alone["data"]] == [0]
    listed = (await post(http)).json()
    assert alone["data"][0]["embedding"] == pytest.approx(listed["data"][0]["embedding"], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "code", "told"),
    [
        ({"input": [1, 2, 3]}, "input", "invalid_value", "token numbers are not taken"),
        ({"input": [[1, 2], [3]]}, "input", "invalid_value", "check_embedding_ctx_length=False"),
        ({"input": ""}, "input", "invalid_value", "empty"),
        ({"input": []}, "input", "invalid_value", "at least 1 item"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value", "at least 1 character"),
        ({"input": ["a", None]}, "input[1]", "invalid_value", "string"),
        ({"input": {"text": "a"}}, "input", "invalid_value", "a string or a list of strings"),
        ({"input": ["a"] * 2049}, "input", "invalid_value", "2048"),
        ({"input": ["a", "word " * 600]}, "input[1]", "context_length_exceeded", "602 tokens"),
        ({"model": ""}, "model", "invalid_value", "at least 1 character"),
        ({"dimensions": 256}, "dimensions", "invalid_value", "give 384"),
        ({"dimensions": 0}, "dimensions", "invalid_value", "greater than or equal to 1"),
        ({"dimensions": "384"}, "dimensions", "invalid_value", "integer"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value", "'float' or 'base64'"),
        ({"input_type": "query"}, "input_type", "unknown_parameter", "not a parameter"),
        ({"dimension": 384}, "dimension", "unknown_parameter", "did you mean 'dimensions'?"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_honoured_is_named(
    http: httpx.AsyncClient, body: Any, param: str, code: str, told: str
) -> None:
    response = await post(http, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert told in error["message"], error["message"]


async def test_a_model_of_another_kind(http: httpx.AsyncClient) -> None:
    for model in ("echo", "text-embedding-9"):
        response = await post(http, model=model)
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert MODEL in error["message"]


async def test_many_at_once_share_batches(http: httpx.AsyncClient, node: Any) -> None:
    await post(http)
    batches, texts = [await node.counter(MODEL, name) for name in ("batches", "texts")]
    answers = await asyncio.gather(*(post(http, input=f"a text of number {n}") for n in range(48)))
    assert [answer.status_code for answer in answers] == [200] * 48
    await node.reaches(MODEL, texts=texts + 48)
    assert await node.counter(MODEL, "batches") - batches < 48


async def test_its_client_leaves(smi: Any, http: httpx.AsyncClient, node: Any) -> None:
    await post(http)
    batches, cancelled = [await node.counter(MODEL, name) for name in ("batches", "cancelled")]
    leaver = asyncio.create_task(post(http, input=["word " * 500] * 300))
    await node.reaches(MODEL, batches=batches + 2)  # that of the first may not have been told yet
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    async with asyncio.timeout(10):  # to work on it to the end would take longer
        await node.reaches(MODEL, cancelled=cancelled + 1)
        while (await node.runner(MODEL)).active:
            await asyncio.sleep(0.01)


async def test_it_is_recorded_without_content(smi: Any, client: openai.AsyncOpenAI, prefect: Any) -> None:
    named = {"x-request-id": "e-7314"}
    made = await client.embeddings.create(model=MODEL, input="secret-7314", extra_headers=named)
    async with asyncio.timeout(30):
        while True:
            runs = (await prefect.post("/flow_runs/filter", json={"sort": "START_TIME_DESC"})).json()
            if found := [run for run in runs if "e-7314" in json.dumps(run)]:
                break
            await asyncio.sleep(0.2)
    assert "secret-7314" not in json.dumps(found)
    assert found[0]["labels"]["prompt_tokens"] == made.usage.prompt_tokens


async def test_documented(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    asked = schema["components"]["schemas"]["EmbeddingsRequest"]["properties"]["input"]
    assert {"type": "string"} in asked["anyOf"]
