"""POST /v1/chat/completions."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import InvalidRequest
from deployments.api import parameters
from deployments.api.body import read_body
from deployments.api.docs import takes_json
from deployments.api.errors import parse
from deployments.api.live import LiveRoute, LiveStream, answered, event, json_response, named, origin
from flows.chat import ChatRequest, chat
from tasks.live import LiveRun
from tasks.protocol.shapes import Content, Message
from tasks.text import Completion, TextDelta

MAX_MESSAGES = 4096  # each costs the event loop some microseconds
_FINGERPRINT = f"smi-{importlib.metadata.version('smi')}"


class ChatMessage(Message):
    """One turn. What an assistant's earlier answer carries besides is passed over when it is empty."""

    model_config = ConfigDict(extra="allow")

    content: Content | None = None  # type: ignore[assignment]  # `checked` says what is there in its stead


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ChatCompletionRequest(ChatRequest):
    """OpenAI's chat completion, as far as this server honours it; anything else is refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1)
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]  # type: ignore[assignment]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def checked(self) -> ChatRequest:
        """The flow's request. Raises `InvalidRequest` for what cannot be honoured."""
        if self.model_extra:
            parameters.refuse_others(self.model_extra, parameters.CHAT, type(self).model_fields)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest(
                "give 'max_tokens' or 'max_completion_tokens', not both", param="max_completion_tokens"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
        for index, message in enumerate(self.messages):
            if message.model_extra:
                known = Message.model_fields
                parameters.refuse_others(
                    message.model_extra, parameters.MESSAGE, known, f"messages[{index}]."
                )
                self.messages[index] = ChatMessage.model_construct(**message.model_dump(include=set(known)))
            if message.content is None:
                param = f"messages[{index}].content"
                raise InvalidRequest(f"{param!r} is missing; give text", param=param)
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        return self


async def create_chat_completion(request: Request) -> Response:
    """Unary, or with `stream` as server-sent events; with `stream_options.include_usage` the last of them
    has the token counts."""
    asked = parse(ChatCompletionRequest, await read_body(request))
    question = asked.checked()
    await named(question.model, "chat")
    if asked.stream:
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        return ChatStream(request, question, usage)
    answer, run = await answered(request, chat, question)
    return json_response(_whole(run, answer), run)


def _head(run: LiveRun, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{run.request_id}",
        "object": kind,
        "created": int(run.started),
        "model": run.labels.get("model", ""),
        "system_fingerprint": _FINGERPRINT,
    }


def _usage(answer: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _whole(run: LiveRun, answer: Completion) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    return {
        **_head(run, "chat.completion"),
        "choices": [choice],
        "usage": _usage(answer),
        "smi": origin(run),
    }


class ChatStream(LiveStream):
    """An answer in chunks. A stream that ends without `[DONE]` is not whole."""

    flow = chat

    def __init__(self, request: Request, question: ChatRequest, usage: bool) -> None:
        super().__init__(request, question)
        self.usage = usage

    async def delta(self, delta: TextDelta) -> None:
        if not self.started:
            await self._open(delta.text)
        else:
            await self.write(self._before + to_json(delta.text) + self._after)

    async def _open(self, text: str = "") -> None:
        """The first chunk, which alone says the role and where the answer is from."""
        await self.start()
        head = _head(self.run, "chat.completion.chunk")
        no_usage: dict[str, None] = {"usage": None} if self.usage else {}
        self._chunk = {**head, **no_usage}
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        first = {"role": "assistant", "content": text, "refusal": None}
        opening = {**self._chunk, "choices": [{**choice, "delta": first}], "smi": origin(self.run)}
        self._before = b"data: " + to_json(self._chunk)[:-1] + b',"choices":[{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        await self.write(event(opening))

    async def ending(self, result: Completion) -> bytes:
        if not self.started:
            await self._open()
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": result.finish_reason}
        end = event({**self._chunk, "choices": [choice]})
        if self.usage:
            end += event({**self._chunk, "choices": [], "usage": _usage(result), "smi": origin(self.run)})
        return end + b"data: [DONE]\n\n"


ROUTES = (
    LiveRoute(
        "/v1/chat/completions",
        create_chat_completion,
        "chat",
        "Answer a conversation",
        takes_json(ChatCompletionRequest),
    ),
)
