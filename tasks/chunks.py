"""Documents in chunks: stretches of text that an embedding model can take at once.

Pure functions. A chunk is `text[start:end]` of its page, never across pages or headings; sentences stay whole
where they fit. Chunks of one section overlap a little, so that what is said at a seam is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from blocks.vectors import Chunk
from tasks.protocol.shapes import Page

SIZE = 800  # characters: about 200 tokens of English
OVERLAP = 120
LONGEST_HEADING = 160
CHARACTERS_PER_TOKEN = 3.2  # of English it is 4 to 5; what is still too long is split again

# These read what anyone may upload: each must take time in proportion to it, whatever it is.
_HEADING = re.compile(r"(#{1,6})[ \t]+")
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


def chunked(
    pages: Sequence[Page], markdown: bool, size: int = SIZE, overlap: int = OVERLAP, most: int | None = None
) -> list[Chunk]:
    """The chunks of a document in order, numbered from 0. Nothing but white space is left out.

    Args:
        size: characters of a chunk at most.
        overlap: of which so many, at most, were the end of the chunk before.
        most: with so many it ends; what follows is not looked at.
    """
    return list(islice(_chunks(pages, markdown, size, overlap), most))


def _chunks(pages: Sequence[Page], markdown: bool, size: int, overlap: int) -> Iterator[Chunk]:
    numbers = count()
    for page in pages:
        for section in _sections(page.text) if markdown else [Section(Span(0, len(page.text)), "")]:
            for start, end in _packed(page.text, section.span, size, overlap):
                yield _chunk(next(numbers), page.number, start, page.text[start:end], section.heading)


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


def _sections(text: str) -> Iterator[Section]:
    """Markdown by its headings. A heading without a text of its own goes with what follows it."""
    path: list[tuple[int, str]] = []
    start, heading, empty, fence = 0, "", True, ""
    for line in re.finditer(r"[^\n]*\n?", text):
        mark = _FENCE.match(line[0])
        if mark:
            fence = "" if fence == mark[1] else fence or mark[1]
        marked = None if fence or mark else _HEADING.match(line[0])
        if marked is None:
            empty = empty and not line[0].strip()
            continue
        if not empty:
            yield Section(Span(start, line.start()), heading)
            start, empty = line.start(), True
        level, title = len(marked[1]), line[0][marked.end() :].rstrip("\r\n").rstrip(" \t#")
        path = [(depth, name) for depth, name in path if depth < level] + [(level, title[-LONGEST_HEADING:])]
        heading = " > ".join(name for _, name in path)[-LONGEST_HEADING:]
    yield Section(Span(start, len(text)), heading)


def _packed(text: str, section: Span, size: int, overlap: int) -> Iterator[Span]:
    """Sentences of a section packed into chunks; one ends with its paragraph if it is half full by then."""
    held: list[Span] = []
    for sentence in _sentences(text, section, size):
        held.append(sentence)
        while sentence.end - held[0].start > size:
            last = _last(text, held[:-1], size)
            yield Span(held[0].start, held[last].end)
            # The next one begins with the last sentences of this one, if there is room for a new one then.
            furthest = max(held[last].end - overlap, held[last + 1].end - size)
            first = last + 1
            while first > 1 and held[first - 1].start >= furthest:
                first -= 1
            held = held[first:]
    if held:
        yield Span(held[0].start, held[-1].end)


def _last(text: str, sentences: Sequence[Span], size: int) -> int:
    """With which of `sentences`, which all have room in a chunk, it ends."""
    for last in range(len(sentences) - 2, -1, -1):
        if _BLANK.search(text, sentences[last].end, sentences[last + 1].start):
            half_full = sentences[last].end - sentences[0].start >= size // 2
            return last if half_full else len(sentences) - 1
    return len(sentences) - 1


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
