"""Documents: text and Markdown as they are, PDF with pypdf.

A PDF may be made to take all the time and memory there is, so each is read in a process of its own, with
limits of both.

Text must be UTF-8, or UTF-16 with its byte order mark; other encodings are refused, since a wrong guess
would be found by nobody.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from blocks.errors import InvalidMedia, LoadFailed
from deployments.node.drivers import pypdf_child
from deployments.node.drivers.base import ReadingDriver, Working
from deployments.node.drivers.options import read_options
from tasks.protocol.shapes import Page

LOOK_S = 0.05  # between looks at whether the text is still wanted
HEAD = 1024  # bytes: a PDF begins there, after a byte order mark and white space if at all
MARKDOWN = (".md", ".markdown", ".mdown", ".mkd")
MAX_TEXT_BYTES = 64 << 20  # of a text, and of what the child says of one page
# All that the child, which reads what may be hostile, gets of the environment: no tokens.
CHILD_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
# Kinds of file that are often given, by their first bytes.
_KNOWN = {
    b"PK\x03\x04": "an Office, EPUB or ZIP file",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"{\\rtf": "an RTF file",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
}
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class PyPdfOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(120, gt=0, description="a PDF that takes longer is refused")
    memory: ByteSize = Field(ByteSize(512 << 20), description="a PDF that takes more is refused")
    max_pages: int = Field(5000, ge=1, description="a PDF of more pages is refused")


class PyPdfDriver(ReadingDriver):
    """Reads one document per slot."""

    def load(self) -> None:
        self.options = read_options(self.model, PyPdfOptions)
        if importlib.util.find_spec("pypdf") is None:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'pypdf' needs the package pypdf; "
                "run `pip install 'smi[rag]'`"
            )

    def run(
        self, document: IO[bytes], name: str, cancelled: threading.Event
    ) -> Iterator[str | Page | Working]:
        self.counters["calls"] += 1
        head = document.read(HEAD)
        document.seek(0)
        with self.counting(cancelled):
            if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"%PDF-"):
                yield "application/pdf"
                yield from self._pages(document, cancelled)
            else:
                markdown = name.lower().endswith(MARKDOWN)
                text = _text(document, head)
                yield "text/markdown" if markdown else "text/plain"
                yield Page(number=1, text=text)

    def _pages(self, document: IO[bytes], cancelled: threading.Event) -> Iterator[Page | Working]:
        options = self.options
        limits = [str(int(options.memory)), str(int(options.seconds) + 1), str(options.max_pages)]
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", pypdf_child.__name__, *limits],
            stdin=document.fileno(),
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in CHILD_ENVIRONMENT if name in os.environ},
        )
        read = total = 0
        try:
            for said in self._lines(child, cancelled):
                if "refused" in said:
                    raise InvalidMedia(said["refused"], param="file")
                if "pages" in said:
                    total = said["pages"]
                    continue
                read = said["number"]
                yield Page(number=read, text=said["text"])
                yield Working(read / total)
            if not cancelled.is_set() and (child.wait() or read < total):
                raise self._broken(child.returncode, read, total)
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()

    def _lines(self, child: subprocess.Popen[bytes], cancelled: threading.Event) -> Iterator[Any]:
        """What the child says, until its end or until it is not wanted."""
        assert child.stdout is not None
        until = time.monotonic() + self.options.seconds
        line, size = list[bytes](), 0  # so far: its blocks, and bytes
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not cancelled.is_set():
                if time.monotonic() > until:
                    raise InvalidMedia(
                        f"the PDF cannot be read within {self.options.seconds:g} s; give it in parts",
                        param="file",
                    )
                if not selector.select(LOOK_S):
                    continue
                block = child.stdout.read1(1 << 20)  # type: ignore[attr-defined]
                if not block:
                    return
                line.append(block)
                size += len(block)
                if b"\n" in block:
                    *lines, rest = b"".join(line).split(b"\n")
                    yield from map(json.loads, lines)
                    line, size = [rest], len(rest)
                if size > MAX_TEXT_BYTES:
                    raise InvalidMedia(
                        f"a page of the PDF has more than {MAX_TEXT_BYTES >> 20} MiB of text", param="file"
                    )

    def _broken(self, code: int, read: int, total: int) -> InvalidMedia:
        where = f"page {read + 1} of the PDF" if total else "the PDF"
        if code == pypdf_child.OUT_OF_MEMORY:
            return InvalidMedia(
                f"{where} takes more than {self.options.memory.human_readable()} of memory", param="file"
            )
        return InvalidMedia(f"{where} is broken and cannot be read", param="file")


def _text(document: IO[bytes], head: bytes) -> str:
    for start, kind in _KNOWN.items():
        if head.startswith(start):
            raise InvalidMedia(
                f"this is {kind}; text, Markdown and PDF can be read: export it as PDF", param="file"
            )
    if os.fstat(document.fileno()).st_size > MAX_TEXT_BYTES:
        raise InvalidMedia(f"a text may have {MAX_TEXT_BYTES >> 20} MiB; give it in parts", param="file")
    raw = document.read()  # all of it; a raw file's `read` with a size may give less
    bom = next((bom for bom in _BOMS if raw.startswith(bom)), b"")
    encoding = _BOMS.get(bom, "utf-8")
    try:
        text = raw[len(bom) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidMedia(
            f"this is neither a PDF nor a text in UTF-8 (or UTF-16 with a byte order mark): byte "
            f"{error.start + len(bom)} is wrong; save it as UTF-8",
            param="file",
        ) from None
    if "\0" in text:
        raise InvalidMedia("this is neither a PDF nor a text: it holds NUL characters", param="file")
    return text
