"""Steps that read documents."""

from __future__ import annotations

import asyncio
import hashlib

from blocks.storage import Document
from tasks.dispatch import infer
from tasks.fleet import current_fleet
from tasks.job import Priority
from tasks.protocol.shapes import ReadingParameters, ReadingResult
from tasks.step import step


@step
async def read(document: Document, name: str = "", priority: Priority | None = None) -> ReadingResult:
    """The text of a document (text, Markdown, PDF), page by page."""
    parameters = ReadingParameters(name=name or document.name)
    done = await infer("reading", "", parameters, media=document, priority=priority)
    return ReadingResult.model_validate_json(done.result)


async def fingerprint(document: Document) -> tuple[str, int]:
    """The id of a document's content, and its size in bytes."""
    storage = (await current_fleet()).storage
    seen, size = hashlib.sha256(), 0
    async for block in document.chunks(storage):
        await asyncio.to_thread(seen.update, block)
        size += len(block)
    return f"doc_{seen.hexdigest()[:24]}", size
