"""Files that a run made, as answers: whole or a range of bytes, never all of one in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import IO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from blocks.errors import InvalidRequest, NotFound
from blocks.storage import CHUNK, Storage
from deployments.jobs.stored import FileKept, Outcome, Progress

SHOWN = ("image/png", "image/jpeg", "image/webp", "audio/")  # what a browser may show; the rest it saves


class RangeNotSatisfiable(InvalidRequest):
    code, status = "range_not_satisfiable", 416


async def progress_of(storage: Storage, outcome: Outcome) -> Progress:
    """How far a run is; nothing if it has not begun."""
    try:
        return Progress.model_validate_json(await asyncio.to_thread(storage.read, outcome.progress))
    except NotFound:
        return Progress()


async def file_response(request: Request, storage: Storage, outcome: Outcome, name: str) -> Response:
    """The file called `name` of a run.

    Raises:
        NotFound: with the names that would be right.
        RangeNotSatisfiable: the header Range asks for what is not there.
        StorageNotShared: the run made it, on a machine whose storage is another.
    """
    kept = await progress_of(storage, outcome)
    file = kept.file(name)
    if file is None:
        names = ", ".join(file.name for file in kept.files) or "none"
        raise NotFound(f"{outcome.folder} has no file {name!r}; its files: {names}")
    first, last = _range(request.headers.get("range"), file.bytes)
    reference = f"{outcome.folder}/files/{name}"
    try:
        opened = await asyncio.to_thread(storage.open, reference)
    except NotFound:
        raise storage.not_shared(reference) from None
    part = last - first + 1
    headers = {
        "content-type": file.content_type or "application/octet-stream",
        "content-length": str(part),
        "content-disposition": _disposition(file),
        "accept-ranges": "bytes",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",  # a signed link is a secret
        "cache-control": "private, max-age=300",
    }
    if part != file.bytes:
        headers["content-range"] = f"bytes {first}-{last}/{file.bytes}"
    return StreamingResponse(_read(opened, first, part), 206 if part != file.bytes else 200, headers)


def _range(header: str | None, size: int) -> tuple[int, int]:
    """The first and the last byte that are asked for.

    A header that is no range is passed over, as RFC 9110 says; several ranges are answered with the whole.
    """
    asked = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header or "")
    if asked is None or asked[0] == "bytes=-":
        return 0, size - 1
    first, last = asked[1], asked[2]
    if first and last and int(first) > int(last):
        return 0, size - 1
    if first:
        begin, end = int(first), min(int(last or size), size - 1)
    else:
        begin, end = max(0, size - int(last)), size - 1
    if begin > end:
        raise RangeNotSatisfiable(f"the file has {size} bytes, and Range asks for {header!r}", param="range")
    return begin, end


def _disposition(file: FileKept) -> str:
    how = "inline" if file.content_type.startswith(SHOWN) else "attachment"
    return f"{how}; filename*=UTF-8''{quote(file.name.rpartition('/')[2])}"


async def _read(file: IO[bytes], first: int, count: int) -> AsyncIterator[bytes]:
    with file:
        await asyncio.to_thread(file.seek, first)
        while count > 0 and (block := await asyncio.to_thread(file.read, min(CHUNK, count))):
            count -= len(block)
            yield block
