"""The flows that a job, a deployment or a live request may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect import Flow
from pydantic import BaseModel

from blocks.errors import InvalidRequest
from flows.chat import ChatRequest, chat
from flows.converse import ConverseRequest, converse
from flows.transcribe import TranscribeRequest, transcribe


@dataclass(frozen=True)
class Entry:
    """A flow, the model of its one parameter `request`, and the adapter of its heaviest step."""

    flow: Flow[Any, Any]
    request: type[BaseModel]
    task: str


FLOWS = {
    entry.flow.name: entry
    for entry in (
        Entry(chat, ChatRequest, "chat"),
        Entry(transcribe, TranscribeRequest, "transcription"),
        Entry(converse, ConverseRequest, "chat"),
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
