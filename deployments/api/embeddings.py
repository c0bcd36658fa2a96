"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.api import parameters
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.api.live import LiveRoute, answered, named, origin, origin_headers
from flows.embed import EmbedRequest, embed
from tasks.live import LiveRun
from tasks.text import Embeddings

TURN = 64  # vectors written as numbers, after which others may have their turn


def _texts(given: Any) -> Any:
    """OpenAI's one text as a list of one. Token numbers are refused: they are another tokenizer's."""
    if isinstance(given, str):
        if not given:
            raise ValueError("it is empty; give text")
        return [given]
    if not isinstance(given, list):
        raise ValueError("give text, a string or a list of strings")
    if any(isinstance(item, int | list) for item in given):
        raise ValueError(
            "token numbers are not taken, each model has its own; give text, a string or a list of strings "
            "(in LangChain: check_embedding_ctx_length=False)"
        )
    return given


class EmbeddingsRequest(EmbedRequest):
    """OpenAI's request for embeddings; anything else is refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1)
    input: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(min_length=1, max_length=2048),
        BeforeValidator(_texts, json_schema_input_type=str | list[str]),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    def checked(self) -> EmbedRequest:
        """The flow's request. Raises `InvalidRequest` for what cannot be honoured."""
        parameters.refuse_others(self.model_extra, parameters.EMBEDDINGS, type(self).model_fields)
        return self


async def create_embeddings(request: Request) -> Response:
    """Vectors of length 1, as numbers or in base64 (float32, little endian)."""
    asked = parse(EmbeddingsRequest, await read_body(request))
    texts = asked.checked()
    await named(texts.model, "embedding")
    made, run = await answered(request, embed, texts)
    vectors = _in_base64(made) if asked.encoding_format == "base64" else await _as_numbers(made)
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % item for item in enumerate(vectors)
    )
    body = b'{"object":"list","data":[' + data + b"]," + to_json(_rest(run, made))[1:]
    return Response(body, 200, origin_headers(run), "application/json")


def _rest(run: LiveRun, made: Embeddings) -> dict[str, Any]:
    """The answer besides its vectors."""
    usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
    return {"model": run.labels["model"], "usage": usage, "smi": origin(run)}


def _in_base64(made: Embeddings) -> list[bytes]:
    raw, size = base64.b64decode(made.vectors), made.dimensions * 4
    return [b'"%b"' % base64.b64encode(raw[start : start + size]) for start in range(0, len(raw), size)]


async def _as_numbers(made: Embeddings) -> list[bytes]:
    written = []
    for number, vector in enumerate(made.floats(), 1):
        written.append(orjson.dumps(vector))
        if number % TURN == 0:
            await asyncio.sleep(0)
    return written


ROUTES = (
    LiveRoute(
        "/v1/embeddings",
        create_embeddings,
        "embeddings",
        "Turn texts into vectors",
        takes_json(EmbeddingsRequest),
    ),
)
