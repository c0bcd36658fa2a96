"""The flows that a job, a deployment, a pipeline's step or a live request may name."""

from __future__ import annotations

from blocks.errors import InvalidRequest
from blocks.validation import quoted
from blocks.vectors import File
from flows.ask import Answer, AskRequest, ask
from flows.chat import ChatRequest, chat
from flows.converse import Conversation, ConverseRequest, converse
from flows.cutout import CutoutRequest, cutout
from flows.embed import EmbedRequest, embed
from flows.entry import Entry
from flows.ingest import IngestRequest, ingest
from flows.pipeline import PipelineRequest, PipelineResult, pipeline
from flows.retrieve import Retrieval, RetrieveRequest, retrieve
from flows.speak import SpeakRequest, speak
from flows.transcribe import TranscribeRequest, transcribe
from flows.upscale import UpscaleRequest, upscale
from tasks.audio import Speech
from tasks.image import Image
from tasks.protocol.shapes import TranscriptionResult
from tasks.text import Completion, Embeddings

# What a pipeline's step may name as its task.
STEPS = {
    entry.flow.name: entry
    for entry in (
        Entry(chat, ChatRequest, Completion, "chat"),
        Entry(transcribe, TranscribeRequest, TranscriptionResult, "transcription"),
        Entry(converse, ConverseRequest, Conversation, "chat"),
        Entry(embed, EmbedRequest, Embeddings, "embedding"),
        Entry(speak, SpeakRequest, Speech, "speech"),
        Entry(cutout, CutoutRequest, Image, "cutout"),
        Entry(upscale, UpscaleRequest, Image, "upscale"),
        Entry(ingest, IngestRequest, File, "embedding"),
        Entry(retrieve, RetrieveRequest, Retrieval, "embedding"),
        Entry(ask, AskRequest, Answer, "chat"),
    )
}

FLOWS = {**STEPS, pipeline.name: Entry(pipeline, PipelineRequest, PipelineResult, "")}


def flow_named(name: str) -> Entry:
    """The flow called `name`.

    Raises:
        InvalidRequest: with the names that would be right.
    """
    if name not in FLOWS:
        raise InvalidRequest(
            f"flow {quoted(name)} does not exist; there are: {', '.join(FLOWS)}", param="flow"
        )
    return FLOWS[name]
