"""Steps that make text, or vectors of it."""

from __future__ import annotations

from pydantic import BaseModel

from tasks.dispatch import infer
from tasks.job import Priority
from tasks.live import current, emit, label
from tasks.protocol.inference_pb2 import Event
from tasks.protocol.shapes import ChatParameters, ChatResult, EmbeddingParameters, EmbeddingResult
from tasks.step import step


class TextDelta(BaseModel):
    """A piece of an answer as it is made."""

    text: str


class Completion(BaseModel):
    """A whole answer. `finish_reason` is OpenAI's; counts are tokens."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def markdown(self) -> str:
        return self.text


@step
async def generate(model: str, parameters: ChatParameters, priority: Priority | None = None) -> Completion:
    """Answer a conversation; deltas are emitted where a client waits for them."""
    run = current()
    streamed = run is not None and run.sink is not None
    done = await infer(
        "chat",
        model,
        parameters,
        on_event=_emit_text if streamed else None,
        priority=priority,
    )
    usage = done.usage
    label(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    return Completion(
        text=ChatResult.model_validate_json(done.result).text,
        finish_reason=done.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


async def _emit_text(event: Event) -> None:
    if event.WhichOneof("event") == "text":
        await emit(TextDelta(text=event.text.text))


class Embeddings(EmbeddingResult):
    """Vectors of texts, and the tokens that were read."""

    prompt_tokens: int


@step
async def embed(model: str, parameters: EmbeddingParameters, priority: Priority | None = None) -> Embeddings:
    """Turn texts into vectors of length 1."""
    done = await infer("embedding", model, parameters, priority=priority)
    tokens = done.usage.prompt_tokens
    label(prompt_tokens=tokens)
    result = EmbeddingResult.model_validate_json(done.result)
    return Embeddings.model_construct(**dict(result), prompt_tokens=tokens)
