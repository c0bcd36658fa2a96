"""Ingest: a document is read, cut into chunks, turned into vectors and put into an index."""

from __future__ import annotations

import asyncio
import time
import unicodedata
from typing import Annotated

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks.errors import InvalidMedia, InvalidRequest, PayloadTooLarge
from blocks.storage import Document
from blocks.vectors import File, Index, IndexName
from tasks.chunks import chunked, size_for
from tasks.documents import fingerprint, read
from tasks.protocol.shapes import ReadingResult
from tasks.vectors import embed_chunks, embedding_model, get_index, store

MAX_NAME = 255
MAX_CHUNKS = 20_000  # their vectors are held at once until all are made


class IngestRequest(BaseModel):
    """A document for an index. The same content again takes the place of what was there."""

    model_config = ConfigDict(extra="forbid")

    index: IndexName
    file: Document
    name: Annotated[str, Field(max_length=MAX_NAME)] = Field(
        "", description="to be cited by; default: the file's"
    )


@flow(name="ingest")
async def ingest(request: IngestRequest) -> File:
    index = await get_index(request.index)
    name = _named(request)
    identity, size = await fingerprint(request.file)
    reading = await read(request.file, name)
    markdown = reading.content_type == "text/markdown"
    chunks = await asyncio.to_thread(
        chunked, reading.pages, markdown, await _size(index), most=MAX_CHUNKS + 1
    )
    _check(reading, len(chunks))
    batches = await embed_chunks(index, chunks)
    file = File(
        id=identity,
        name=name,
        content_type=reading.content_type,
        bytes=size,
        pages=len(reading.pages),
        chunks=sum(len(batch.chunks) for batch in batches),
        pages_without_text=[page.number for page in reading.pages if not page.text.strip()],
        created=time.time(),
    )
    return await store(index, file, batches)


def _named(request: IngestRequest) -> str:
    """What the document is cited by."""
    name = request.name or request.file.name or "document"
    problem = ""
    if len(name) > MAX_NAME:
        problem = f"has {len(name)} characters, more than {MAX_NAME}"
    elif any(unicodedata.category(mark) in ("Cc", "Cs") for mark in name):
        problem = "holds NUL or another control character"
    if problem:
        param = "name" if request.name else "file"
        raise InvalidRequest(f"the document's name {problem}; give another in 'name'", param=param)
    return name


async def _size(index: Index) -> int:
    return size_for((await embedding_model(index.model)).context)


def _check(reading: ReadingResult, chunks: int) -> None:
    if not chunks:
        raise InvalidMedia(
            f"the document has no text on any of its {len(reading.pages)} pages (a scan, perhaps); "
            "give one with text",
            param="file",
        )
    if chunks > MAX_CHUNKS:
        raise PayloadTooLarge(
            f"the document makes more than {MAX_CHUNKS} chunks; give it in parts", param="file"
        )
