from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

WRONG = "sk-smi-" + "x" * 43


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    models = {model.id: model async for model in client.models.list()}
    assert {"echo", "smollm2-135m", "whisper-tiny.en"} <= models.keys()
    whisper = await client.models.retrieve("whisper-1")
    assert whisper.id == "whisper-tiny.en"
    assert whisper.object == "model"
    assert whisper.model_extra is not None
    assert (whisper.model_extra["task"], whisper.model_extra["aliases"]) == ("transcription", ["whisper-1"])
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/model")
    assert caught.value.code == "model_not_found"


async def test_health_needs_no_key(smi: Any) -> None:
    async with httpx.AsyncClient(base_url=smi.url, trust_env=False) as anyone:
        health = (await anyone.get("/health")).json()
        assert health["nodes"] >= 1
        assert health["database"] == "ok"
        assert (await anyone.get("/docs")).status_code == 200
        assert (await anyone.get("/metrics")).status_code == 401


async def test_metrics(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
    await http.post("/v1/chat/completions", json={**body, "stream": True})
    await http.post("/v1/chat/completions", json={**body, "stream": 1})
    await http.post("/v1/audio/speech", json={"model": "tts-1", "input": "Yes."})
    text = (await http.get("/metrics")).text
    assert 'smi_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert 'smi_requests_total{route="/v1/chat/completions",status="400"}' in text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["smi_nodes"]) >= 1
    for route in ("/v1/chat/completions", "/v1/audio/speech"):
        assert float(figures[f'smi_first_token_seconds_count{{route="{route}"}}']) >= 1
    assert float(figures["smi_requests_in_flight"]) == 1  # the one that asks
    assert {
        "smi_recorder_backlog",
        "smi_recorder_recorded_total",
        "smi_recorder_dropped_total",
    } <= figures.keys()


async def test_the_documentation_shows_the_requests(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    properties = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "model", "stream", "max_completion_tokens"} <= properties.keys()
    form = schema["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert "multipart/form-data" in form
    assert schema["security"] == [{"key": []}]
    text = str(schema)
    assert "#/$defs" not in text


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Basic c2s6eA==",
        WRONG,
        f"Bearer {WRONG}",
        "Bearer sk-proj-abc",
        "Bearer \xff",
    ],
)
async def test_no_key_and_wrong_keys(smi: Any, header: str | None) -> None:
    async with httpx.AsyncClient(base_url=smi.url, trust_env=False) as anyone:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nowhere")):
            response = await anyone.request(method, path, headers=headers)
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert WRONG not in response.text
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/completions", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
    ],
)
async def test_wrong_paths_and_methods(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("given", ["a b", "x" * 65, "\xe9", "", "a;b"])
async def test_request_ids_that_are_refused(http: httpx.AsyncClient, given: str) -> None:
    response = await http.get("/v1/models", headers={"x-request-id": given.encode("latin-1")})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    assert response.headers["x-request-id"].startswith("req_")


async def test_request_ids_go_out_on_errors_too(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "My.Id-1_2"})
    assert response.status_code == 400
    assert response.headers["x-request-id"] == "My.Id-1_2"
    ids = {(await http.get("/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_load_balancers_ask_for_health_by_head(smi: Any) -> None:
    async with httpx.AsyncClient(base_url=smi.url, trust_env=False) as anyone:
        response = await anyone.head("/health")
        assert (response.status_code, response.content) == (200, b"")
