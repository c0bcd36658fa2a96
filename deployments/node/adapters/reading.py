"""Reading: a document in chunks, and its text page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from tempfile import TemporaryFile
from typing import IO, cast

from blocks.errors import PayloadTooLarge, UpstreamFailed, storable
from deployments.node.adapters.base import Adapter, Emit, working
from deployments.node.adapters.upload import spool
from deployments.node.bridge import driving
from deployments.node.drivers.base import ReadingDriver
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import Page, ReadingParameters, ReadingResult

MAX_BYTES = 512 << 20
MAX_TEXT = 10_000_000  # characters; what they are in bytes must fit into one message


class ReadingAdapter(Adapter[ReadingDriver, ReadingParameters]):
    """The text of a document over any `ReadingDriver`. `Done.result` is a `ReadingResult`.

    The document lies in a temporary file, so that memory does not grow with its size.
    """

    shape = ReadingParameters

    async def run(
        self, parameters: ReadingParameters, media: AsyncIterator[bytes], emit: Emit | None
    ) -> Done:
        with TemporaryFile() as upload:
            await spool(media, upload, MAX_BYTES, "document")
            # Unbuffered, since another process may read it, and move in it.
            result = await self._read(cast(IO[bytes], upload.raw), parameters.name, emit)
        return Done(finish_reason="stop", result=result.model_dump_json().encode())

    async def _read(self, document: IO[bytes], name: str, emit: Emit | None) -> ReadingResult:
        content_type, pages, size = "", list[Page](), 0
        async with driving(partial(self.driver.run, document, name)) as items:
            async for item in items:
                if isinstance(item, str):
                    content_type = item
                elif isinstance(item, Page):
                    pages.append(Page(number=item.number, text=storable(item.text)))
                    size += len(item.text)
                    if size > MAX_TEXT:
                        raise PayloadTooLarge(
                            f"the document has more than {MAX_TEXT} characters of text "
                            f"(within page {item.number}); give it in parts",
                            param="file",
                        )
                elif emit is not None:
                    await emit(working(item.fraction))
        if not content_type:
            raise UpstreamFailed(f"model {self.driver.model.name} broke off its reading; try again")
        return ReadingResult(content_type=content_type, pages=pages)
