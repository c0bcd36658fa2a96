"""The flows that a job, a deployment or a live request may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect import Flow
from pydantic import BaseModel

from blocks.errors import InvalidRequest
from flows.chat import ChatRequest, chat
from flows.converse import Conversation, ConverseRequest, converse
from flows.cutout import CutoutRequest, cutout
from flows.embed import EmbedRequest, embed
from flows.speak import SpeakRequest, speak
from flows.transcribe import TranscribeRequest, transcribe
from flows.upscale import UpscaleRequest, upscale
from tasks.audio import Speech
from tasks.image import Image
from tasks.protocol.shapes import TranscriptionResult
from tasks.text import Completion, Embeddings


@dataclass(frozen=True)
class Entry:
    """A flow, the models of its one parameter `request` and of what it returns, and the adapter of its
    heaviest step."""

    flow: Flow[Any, Any]
    request: type[BaseModel]
    result: type[BaseModel]
    task: str


FLOWS = {
    entry.flow.name: entry
    for entry in (
        Entry(chat, ChatRequest, Completion, "chat"),
        Entry(transcribe, TranscribeRequest, TranscriptionResult, "transcription"),
        Entry(converse, ConverseRequest, Conversation, "chat"),
        Entry(embed, EmbedRequest, Embeddings, "embedding"),
        Entry(speak, SpeakRequest, Speech, "speech"),
        Entry(cutout, CutoutRequest, Image, "cutout"),
        Entry(upscale, UpscaleRequest, Image, "upscale"),
    )
}


def flow_named(name: str) -> Entry:
    """The flow called `name`.

    Raises:
        InvalidRequest: with the names that would be right.
    """
    if name not in FLOWS:
        raise InvalidRequest(f"flow {name!r} does not exist; there are: {', '.join(FLOWS)}", param="flow")
    return FLOWS[name]
