"""Converse: a spoken question is written down, then answered."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks.storage import Recording
from tasks.audio import hear
from tasks.protocol.shapes import (
    ChatParameters,
    ChatTemperature,
    MaxTokens,
    Message,
    Seed,
    TranscriptionParameters,
)
from tasks.text import Completion, generate


class ConverseRequest(BaseModel):
    """A recorded question. Models by name or alias; empty means the catalogue's first of its kind."""

    model_config = ConfigDict(extra="forbid")

    file: Recording
    model: str = ""
    transcription_model: str = ""
    instructions: str | None = Field(None, description="system message for the answer")
    max_tokens: MaxTokens | None = None
    temperature: ChatTemperature | None = None
    seed: Seed | None = None


class Conversation(BaseModel):
    """What was asked and what was answered."""

    transcript: str
    answer: Completion

    def markdown(self) -> str:
        return f"### Transcript\n\n{self.transcript}\n\n### Answer\n\n{self.answer.text}"


@flow(name="converse")
async def converse(request: ConverseRequest) -> Conversation:
    heard = await hear(request.transcription_model, request.file, TranscriptionParameters())
    messages = [Message(role="user", content=heard.text)]
    if request.instructions:
        messages.insert(0, Message(role="system", content=request.instructions))
    answer = await generate(
        request.model,
        ChatParameters(
            messages=messages,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
        ),
    )
    return Conversation(transcript=heard.text, answer=answer)
