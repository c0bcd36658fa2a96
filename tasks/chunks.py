"""Documents in chunks: stretches of text that an embedding model can take at once.

Pure functions. A chunk is `text[start:end]` of its page, never across pages or headings; sentences stay whole
where they fit. Chunks of one section overlap a little, so that what is said at a seam is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blocks.vectors import Chunk
from tasks.protocol.shapes import Page

SIZE = 800  # characters: about 200 tokens of English
OVERLAP = 120
LONGEST_HEADING = 160
CHARACTERS_PER_TOKEN = 3.2  # of English it is 4 to 5; what is still too long is split again

_HEADING = re.compile(r"(#{1,6})[ \t]+(.*?)[ \t#]*$")
_FENCE = re.compile(r"\s{0,3}(```|~~~)")
_BLANK = re.compile(r"\n[ \t]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]+\s*")


class Span(NamedTuple):
    start: int
    end: int


class Section(NamedTuple):
    """A stretch of text under one heading, which is its first line."""

    span: Span
    heading: str


def chunked(pages: Sequence[Page], markdown: bool, size: int = SIZE, overlap: int = OVERLAP) -> list[Chunk]:
    """The chunks of a document in order, numbered from 0. Nothing but white space is left out.

    Args:
        size: characters of a chunk at most.
        overlap: of which so many, at most, were the end of the chunk before.
    """
    chunks: list[Chunk] = []
    for page in pages:
        for section in _sections(page.text) if markdown else [Section(Span(0, len(page.text)), "")]:
            for start, end in _packed(page.text, section.span, size, overlap):
                text = page.text[start:end]
                chunks.append(_chunk(len(chunks), page.number, start, text, section.heading))
    return chunks


def split(chunk: Chunk) -> list[Chunk]:
    """A chunk in two, both with its number; one that cannot be cut comes back alone."""
    half = len(chunk.text) // 2
    if half < 1:
        return [chunk]
    spaces = [match.end() for match in re.finditer(r"\s+", chunk.text)]
    cut = min(spaces, key=lambda at: abs(at - half), default=half)
    if not len(chunk.text) // 4 <= cut <= 3 * len(chunk.text) // 4:
        cut = half
    pieces = (Span(0, cut), Span(cut, len(chunk.text)))
    return [
        _chunk(chunk.number, chunk.page, chunk.start + start, chunk.text[start:end], chunk.heading)
        for start, end in (_stripped(chunk.text, piece) for piece in pieces)
        if start < end
    ]


def size_for(context: int | None) -> int:
    """Characters of a chunk for a model that reads `context` tokens at once."""
    return SIZE if context is None else max(64, min(SIZE, int(context * CHARACTERS_PER_TOKEN)))


def embedded(chunk: Chunk) -> str:
    """What an embedding model reads of a chunk: its headings before it, unless it begins with them."""
    heading = chunk.heading if not chunk.text.startswith("#") else chunk.heading.rpartition(" > ")[0]
    return f"{heading}\n{chunk.text}" if heading else chunk.text


def _chunk(number: int, page: int, start: int, text: str, heading: str) -> Chunk:
    return Chunk(number=number, page=page, start=start, end=start + len(text), heading=heading, text=text)


def _sections(text: str) -> list[Section]:
    """Markdown by its headings. A heading without a text of its own goes with what follows it."""
    path: list[tuple[int, str]] = []
    found: list[Section] = []
    start, heading, empty, fence = 0, "", True, ""
    for line in re.finditer(r"[^\n]*\n?", text):
        mark = _FENCE.match(line[0])
        if mark:
            fence = "" if fence == mark[1] else fence or mark[1]
        title = None if fence or mark else _HEADING.match(line[0].rstrip("\r\n"))
        if title is None:
            empty = empty and not line[0].strip()
            continue
        if not empty:
            found.append(Section(Span(start, line.start()), heading))
            start, empty = line.start(), True
        level = len(title[1])
        path = [(depth, name) for depth, name in path if depth < level] + [(level, title[2])]
        heading = " > ".join(name for _, name in path)[-LONGEST_HEADING:]
    found.append(Section(Span(start, len(text)), heading))
    return found


def _packed(text: str, section: Span, size: int, overlap: int) -> Iterator[Span]:
    """Sentences of a section packed into chunks; one ends with its paragraph if it is half full by then."""
    sentences = list(_sentences(text, section, size))
    first = 0
    while first < len(sentences):
        last, paragraph = first, None
        while last + 1 < len(sentences) and sentences[last + 1].end - sentences[first].start <= size:
            if _BLANK.search(text, sentences[last].end, sentences[last + 1].start):
                paragraph = last
            last += 1
        rest = last + 1 == len(sentences)
        if not rest and paragraph is not None:
            half_full = sentences[paragraph].end - sentences[first].start >= size // 2
            last = paragraph if half_full else last
        yield Span(sentences[first].start, sentences[last].end)
        if rest:
            return
        # The next one begins with the last sentences of this one, if there is room for a new one then.
        furthest = max(sentences[last].end - overlap, sentences[last + 1].end - size)
        before, first = first, last + 1
        while first - 1 > before and sentences[first - 1].start >= furthest:
            first -= 1


def _sentences(text: str, section: Span, size: int) -> Iterator[Span]:
    """Sentences without the white space around them; one longer than `size` in pieces."""
    for paragraph in _between(text, section, _BLANK):
        for sentence in _between(text, paragraph, _SENTENCE):
            start, end = _stripped(text, sentence)
            while end - start > size:
                cut = text.rfind(" ", start + size // 2, start + size) + 1 or start + size
                yield _stripped(text, Span(start, cut))
                start, _ = _stripped(text, Span(cut, end))
            if start < end:
                yield Span(start, end)


def _between(text: str, span: Span, seam: re.Pattern[str]) -> Iterator[Span]:
    start = span.start
    for match in seam.finditer(text, span.start, span.end):
        yield Span(start, match.end())
        start = match.end()
    yield Span(start, span.end)


def _stripped(text: str, span: Span) -> Span:
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return Span(start, end)
