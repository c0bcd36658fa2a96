"""Indexes of documents: what the vectors service and those who call it say to each other.

JSON over gRPC, one unary method per operation (`/smi.Vectors/search`). An index belongs to the key that made
it (`owner`); no other key's calls see it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

METHOD = "/smi.Vectors/"
AUDIENCE = "vectors"  # to whom callers prove that they know the join token


def _named(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first")
    return name


def _document(document: str) -> str:
    if re.fullmatch(r"doc_[0-9a-f]{24}", document) is None:
        raise ValueError("must be 'doc_' and 24 hexadecimal digits")
    return document


IndexName = Annotated[str, AfterValidator(_named)]
DocumentId = Annotated[str, AfterValidator(_document)]


class Index(BaseModel):
    """A collection of documents. `source` is where the embedding model came from when it was made: vectors
    of another model cannot be compared with these. `created` in seconds since the epoch."""

    name: IndexName
    model: str
    source: str
    dimensions: Annotated[int, Field(ge=1, le=32768)]
    created: float


class File(BaseModel):
    """A document of an index; its id is that of its content.

    Attributes:
        bytes: its size.
        pages_without_text: numbers of pages (from 1) that say nothing, as scanned ones do.
    """

    id: DocumentId
    name: str
    content_type: str
    bytes: int
    pages: int
    chunks: int
    pages_without_text: list[int]
    created: float


class Chunk(BaseModel):
    """A stretch of a page's text, `text[start:end]`, under the headings `heading`. Counted from 0."""

    number: int
    page: int
    start: int
    end: int
    heading: str
    text: str


class Hit(BaseModel):
    """A chunk that was found. `score`: cosine of question and chunk, -1 to 1."""

    document: str
    name: str
    page: int
    chunk: int
    start: int
    end: int
    heading: str
    text: str
    score: float


class Owned(BaseModel):
    """What every call says."""

    owner: int


class OfIndex(Owned):
    name: IndexName


class Create(Owned):
    index: Index


class OfSame(OfIndex):
    """Of the index that was `created` then; not of another that was made under its name since."""

    created: float


class Put(OfSame):
    """Chunks of a document; vectors in base64 of float32, little endian, (chunks, dimensions).

    Chunk 0 comes in the last call for a document, with `file`: from then on the document is there.
    """

    document: DocumentId
    chunks: list[Chunk]
    vectors: str
    file: File | None = None


class Remove(OfIndex):
    document: DocumentId


class Search(OfSame):
    vector: str
    top_k: Annotated[int, Field(ge=1, le=1000)]


class Nothing(BaseModel):
    """An answer without content."""


class Indexes(BaseModel):
    data: list[Index]


class Files(BaseModel):
    data: list[File]


class Hits(BaseModel):
    data: list[Hit]


class Fault(BaseModel):
    """An error of `blocks.errors`, to be raised by the caller."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    detail: str = ""
