"""What a request brings, in chunks, into a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO

from blocks.errors import InvalidMedia, PayloadTooLarge

IN_MEMORY = 8 << 20  # bytes; what is larger lies on disk


async def spool(media: AsyncIterator[bytes], upload: IO[bytes], max_bytes: int, what: str) -> None:
    """Write `media` to `upload`, and go back to its start.

    Args:
        upload: a buffered file; a raw one may write less than it is given.

    Raises:
        InvalidMedia: `what` has no bytes.
        PayloadTooLarge: it has more than `max_bytes`.
    """
    size = 0
    async for chunk in media:
        size += len(chunk)
        if size > max_bytes:
            raise PayloadTooLarge(f"the {what} is larger than {max_bytes >> 20} MiB", param="file")
        await asyncio.to_thread(upload.write, chunk)
    if not size:
        raise InvalidMedia(f"the {what} is empty (0 bytes)", param="file")
    await asyncio.to_thread(upload.flush)
    upload.seek(0)
