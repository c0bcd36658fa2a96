"""deployments/node/drivers/pypdf.py under the reading adapter: real documents, made here byte by byte."""

from __future__ import annotations

import asyncio
import resource
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pypdf import PdfReader, PdfWriter

from blocks.catalogue import Model
from blocks.errors import InvalidMedia, PayloadTooLarge
from deployments.node.adapters import reading
from deployments.node.adapters.reading import ReadingAdapter
from deployments.node.drivers import pypdf
from deployments.node.drivers.pypdf import PyPdfDriver
from tasks.protocol.inference_pb2 import Event
from tasks.protocol.shapes import ReadingParameters, ReadingResult


def pdf(*pages: bytes, compress: bool = False) -> bytes:
    """A PDF whose pages have these content streams."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%b]>>" % (len(pages), kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for index, content in enumerate(pages):
        filtered = b"/Filter/FlateDecode" if compress else b""
        stream = zlib.compress(content) if compress else content
        resources = b"/MediaBox[0 0 600 800]/Resources<</Font<</F 3 0 R>>>>"
        objects.append(b"<</Type/Page/Parent 2 0 R%b/Contents %d 0 R>>" % (resources, 5 + 2 * index))
        objects.append(b"<<%b/Length %d>>stream\n%b\nendstream" % (filtered, len(stream), stream))
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    trailer = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + trailer


def saying(text: str) -> bytes:
    return b"BT /F 12 Tf 50 700 Td (%b) Tj ET" % text.encode()


def driver_of(**options: Any) -> PyPdfDriver:
    driver = PyPdfDriver(Model(name="pypdf", task="reading", driver="pypdf", options=options))
    driver.load()
    return driver


async def read(
    document: bytes, name: str = "", driver: PyPdfDriver | None = None, events: list[Event] | None = None
) -> ReadingResult:
    async def media() -> AsyncIterator[bytes]:
        for start in range(0, len(document), 100_000):
            yield document[start : start + 100_000]

    async def emit(event: Event) -> None:
        if events is not None:
            events.append(event)

    adapter = ReadingAdapter(driver or driver_of())
    done = await adapter.run(ReadingParameters(name=name), media(), emit)
    return ReadingResult.model_validate_json(done.result)


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "pypdf_child" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def test_a_pdf_is_read_page_by_page_and_empty_pages_are_listed() -> None:
    events: list[Event] = []
    result = await read(pdf(saying("One tide."), b"", saying("Three moons.")), events=events)
    assert result.content_type == "application/pdf"
    assert [(page.number, page.text.strip()) for page in result.pages] == [
        (1, "One tide."),
        (2, ""),
        (3, "Three moons."),
    ]
    assert [round(event.progress.fraction, 2) for event in events] == [0.33, 0.67, 1]


@pytest.mark.parametrize(
    ("document", "name", "kind", "text"),
    [
        ("# Sea\né".encode(), "a.MD", "text/markdown", "# Sea\né"),
        ("Sea é".encode(), "a.txt", "text/plain", "Sea é"),
        (b"A PDF begins with %PDF-1.7", "a.txt", "text/plain", "A PDF begins with %PDF-1.7"),
        ("\ufeffSea".encode(), "", "text/plain", "Sea"),
        ("\ufeffSea é".encode("utf-16-le"), "", "text/plain", "Sea é"),
        ("\ufeffSea é".encode("utf-16-be"), "", "text/plain", "Sea é"),
    ],
)
async def test_texts(document: bytes, name: str, kind: str, text: str) -> None:
    result = await read(document, name)
    assert (result.content_type, [page.text for page in result.pages]) == (kind, [text])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b"", "empty"),
        ("Sea é".encode("latin-1"), "byte 4 is wrong; save it as UTF-8"),
        (b"PK\x03\x04 docx", "an Office, EPUB or ZIP file"),
        (b"\x89PNG\r\n", "a picture"),
        (b"text\0text", "NUL"),
        (b"%PDF-1.7\nno more", "the PDF is broken"),
        (b"\xef\xbb\xbf\r\n %PDF-1.7\nno more", "the PDF is broken"),
        (pdf(saying("x"))[:200], "the PDF is broken"),
    ],
)
async def test_what_cannot_be_read_is_said(document: bytes, said: str) -> None:
    with pytest.raises(InvalidMedia) as refused:
        await read(document)
    assert said in refused.value.message
    assert refused.value.param == "file"


async def test_an_encrypted_pdf_is_refused_and_one_without_a_password_to_read_it_is_not(
    tmp_path: Path,
) -> None:
    for password, expected in (("secret", "encrypted"), ("", "One tide.")):
        path = tmp_path / "source.pdf"
        path.write_bytes(pdf(saying("One tide.")))
        writer = PdfWriter(PdfReader(path))
        writer.encrypt(password, owner_password="owner", algorithm="AES-256")
        writer.write(tmp_path / "locked.pdf")
        locked = (tmp_path / "locked.pdf").read_bytes()
        if password:
            with pytest.raises(InvalidMedia, match=expected):
                await read(locked)
        else:
            assert expected in (await read(locked)).pages[0].text


async def test_a_pdf_that_takes_too_long_or_too_much_or_has_too_many_pages_is_refused() -> None:
    endless = pdf(b"BT /F 12 Tf " + b"1 0 0 1 5 5 Tm (x) Tj " * 1_000_000 + b"ET", compress=True)
    assert len(endless) < 200_000
    with pytest.raises(InvalidMedia, match=r"within 1 s"):
        await read(endless, driver=driver_of(seconds=1))
    with pytest.raises(InvalidMedia, match=r"page 1 of the PDF takes more than 96.0MiB"):
        await read(endless, driver=driver_of(memory="96MiB"))
    with pytest.raises(InvalidMedia, match="has 3 pages; at most 2"):
        await read(pdf(b"", b"", b""), driver=driver_of(max_pages=2))
    assert children() == []


async def test_a_long_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_TEXT", 1000)
    driver = driver_of()
    with pytest.raises(PayloadTooLarge, match="within page 3"):
        await read(pdf(*[saying("w" * 400)] * 500), driver=driver)
    assert children() == []
    assert (driver.counters["calls"], driver.counters["cancelled"]) == (1, 1)


async def test_a_page_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypdf, "MAX_TEXT_BYTES", 1 << 20)
    long = pdf(saying("w" * 3_000_000), compress=True)
    with pytest.raises(InvalidMedia, match="a page of the PDF has more than 1 MiB of text"):
        await read(long)
    assert children() == []
    monkeypatch.setattr(pypdf, "MAX_TEXT_BYTES", 4 << 20)
    assert len((await read(long)).pages[0].text.strip()) == 3_000_000


async def test_a_document_that_finds_no_room_is_never_cut() -> None:
    """A raw file's `write` tells by its result alone that it wrote less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            await read(b"w" * 150_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_cancelling_ends_the_process_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which knows nothing of what is in the node's environment: the PDF may be hostile."""
    monkeypatch.setenv("SMI_JOIN_TOKEN", "secret")
    endless = pdf(b"BT /F 12 Tf " + b"1 0 0 1 5 5 Tm (x) Tj " * 1_000_000 + b"ET", compress=True)
    work = asyncio.create_task(read(endless))
    async with asyncio.timeout(10):
        while not children():
            await asyncio.sleep(0.02)
    (child,) = children()
    assert "secret" not in child.environ().values()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 30)  # reading it would take minutes
    assert children() == []
