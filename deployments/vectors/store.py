"""Indexes in Milvus, or in Milvus Lite: the same client speaks to either.

Each index is a collection with one row per chunk. Chunk 0's row also says what its document is; it is
written last, so a document whose writing broke off is not there. The collection `smi_indexes` lists the
indexes.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from blocks.errors import Conflict, InvalidRequest, NotFound, SmiError, Unavailable
from blocks.vectors import (
    Create,
    File,
    Files,
    Hit,
    Hits,
    Index,
    Indexes,
    Nothing,
    OfIndex,
    OfSame,
    Owned,
    Put,
    Remove,
    Search,
)

CATALOGUE = "smi_indexes"
TIMEOUT_S = 30.0
NEVER_MS = 2**31 - 1
PAGE = 1000  # rows of a listing fetched at once
ROWS = 500  # rows written at once
NO_COLLECTION, NOT_LOADED, NO_CONNECTION = 100, 101, 2  # Milvus' codes
FIELDS = ["document", "number", "page", "start", "stop", "heading", "text"]


class Store:
    """All indexes. Reads (`indexes`, `get`, `files`, `search`) may be called from any thread; all else takes
    turns, in one.

    Args:
        uri: of a Milvus server, or `unix:PATH` of Milvus Lite in this process.
        lite: it is Milvus Lite: a search compares with every vector. A server chooses how to search.
    """

    def __init__(self, uri: str, token: str = "", *, lite: bool) -> None:
        self._uri, self._token, self._lite = uri, token, lite
        self._kind = "FLAT" if lite else "AUTOINDEX"
        self._loaded: set[str] = set()
        self._connecting = threading.Lock()
        self._client: MilvusClient | None = None

    def create(self, asked: Create) -> Index:
        collection = _collection(asked.owner, asked.index.name)
        with self._told() as milvus:
            if self._find(milvus, collection) is not None:
                raise Conflict(f"index {asked.index.name!r} exists already", param="name")
            milvus.drop_collection(collection)  # what a deletion that broke off has left
            self._loaded.discard(collection)
            self._make(milvus, collection, asked.index.dimensions)
            row = {"id": collection, "owner": asked.owner, "info": asked.index.model_dump(), "vector": [1, 0]}
            milvus.upsert(CATALOGUE, [row])
            self._flush(milvus, CATALOGUE)
        return asked.index

    def indexes(self, asked: Owned) -> Indexes:
        with self._told() as milvus:
            rows = self._all(milvus, CATALOGUE, f"owner == {asked.owner}", ["info"])
        found = [Index.model_validate(row["info"]) for row in rows]
        return Indexes(data=sorted(found, key=lambda index: index.name))

    def get(self, asked: OfIndex) -> Index:
        with self._told() as milvus:
            return self._there(milvus, asked)[0]

    def drop(self, asked: OfIndex) -> Nothing:
        collection = _collection(asked.owner, asked.name)
        with self._told() as milvus:
            self._there(milvus, asked)
            milvus.delete(CATALOGUE, ids=[collection])
            self._flush(milvus, CATALOGUE)
            milvus.drop_collection(collection)
            self._loaded.discard(collection)
        return Nothing()

    def put(self, asked: Put) -> Nothing:
        collection = _collection(asked.owner, asked.name)
        with self._told() as milvus:
            index, _ = self._there(milvus, asked)
            vectors = _floats(asked.vectors, index.dimensions)
            if len(vectors) != len(asked.chunks):
                raise InvalidRequest(f"{len(asked.chunks)} chunks came with {len(vectors)} vectors")
            rows = [_row(asked, number, vectors[number]) for number in range(len(asked.chunks))]
            for start in range(0, len(rows), ROWS):
                milvus.upsert(collection, rows[start : start + ROWS])
            if asked.file is not None:
                beyond = f'document == "{asked.document}" and number >= {asked.file.chunks}'
                milvus.delete(collection, filter=beyond)
                self._flush(milvus, collection)
        return Nothing()

    def files(self, asked: OfIndex) -> Files:
        with self._told() as milvus:
            _, collection = self._there(milvus, asked)
            rows = self._all(milvus, collection, "number == 0", ["file"])
        found = [File.model_validate(row["file"]) for row in rows]
        return Files(data=sorted(found, key=lambda file: (file.created, file.id)))

    def remove(self, asked: Remove) -> Nothing:
        collection = _collection(asked.owner, asked.name)
        with self._told() as milvus:
            self._there(milvus, asked)
            first = milvus.query(collection, ids=[_key(asked.document, 0)], output_fields=["document"])
            milvus.delete(collection, filter=f'document == "{asked.document}"')
            self._flush(milvus, collection)
        if not first:
            raise NotFound(f"index {asked.name!r} has no file {asked.document!r}", param="file")
        return Nothing()

    def search(self, asked: Search) -> Hits:
        with self._told() as milvus:
            index, collection = self._there(milvus, asked)
            vector = _floats(asked.vector, index.dimensions)
            if len(vector) != 1:
                raise InvalidRequest(f"a search takes one vector, not {len(vector)}")
            found = milvus.search(
                collection, [vector[0].tolist()], limit=asked.top_k, output_fields=FIELDS, anns_field="vector"
            )[0]
            names = self._names(milvus, collection, {hit["entity"]["document"] for hit in found})
        return Hits(data=[_hit(hit, names) for hit in found if hit["entity"]["document"] in names])

    def _names(self, milvus: MilvusClient, collection: str, documents: set[str]) -> dict[str, str]:
        """Names of those documents that are whole."""
        if not documents:
            return {}
        keys = [_key(document, 0) for document in documents]
        rows = milvus.query(collection, ids=keys, output_fields=["document", "file"])
        return {row["document"]: row["file"]["name"] for row in rows}

    def _there(self, milvus: MilvusClient, asked: OfIndex) -> tuple[Index, str]:
        """The index, ready to be searched, and its collection."""
        collection = _collection(asked.owner, asked.name)
        index = self._find(milvus, collection)
        if index is None:
            rows = self._all(milvus, CATALOGUE, f"owner == {asked.owner}", ["info"])
            there = ", ".join(sorted(row["info"]["name"] for row in rows)) or "none"
            raise NotFound(f"index {asked.name!r} does not exist; there are: {there}", param="index")
        if isinstance(asked, OfSame) and asked.created != index.created:
            raise Conflict(
                f"index {asked.name!r} was deleted meanwhile, and another made of that name; do it again",
                param="index",
            )
        if collection not in self._loaded:
            milvus.load_collection(collection)
            self._loaded.add(collection)
        return index, collection

    def _find(self, milvus: MilvusClient, collection: str) -> Index | None:
        rows = milvus.query(CATALOGUE, ids=[collection], output_fields=["info"])
        return Index.model_validate(rows[0]["info"]) if rows else None

    def _make(self, milvus: MilvusClient, collection: str, dimensions: int) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=64)
        schema.add_field("document", DataType.VARCHAR, max_length=64)
        schema.add_field("number", DataType.INT64)
        schema.add_field("page", DataType.INT64)
        schema.add_field("start", DataType.INT64)
        schema.add_field("stop", DataType.INT64)
        schema.add_field("heading", DataType.VARCHAR, max_length=4096)  # bytes
        schema.add_field("text", DataType.VARCHAR, max_length=65535)
        schema.add_field("file", DataType.JSON, nullable=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimensions)
        self._create(milvus, collection, schema)

    def _create(self, milvus: MilvusClient, collection: str, schema: Any) -> None:
        params = milvus.prepare_index_params()
        params.add_index("vector", index_type=self._kind, metric_type="COSINE")
        milvus.create_collection(collection, schema=schema, index_params=params, consistency_level="Strong")

    def _flush(self, milvus: MilvusClient, collection: str) -> None:
        """What is not flushed is safe, but slow to search in Milvus Lite. A server flushes by itself."""
        if self._lite:
            milvus.flush(collection)

    def _all(self, milvus: MilvusClient, collection: str, which: str, fields: list[str]) -> list[Any]:
        if self._lite:  # which has no limit to a query's rows, and no iterator worth the name
            found: list[Any] = milvus.query(collection, filter=which, output_fields=fields)
            return found
        rows: list[Any] = []
        pages = milvus.query_iterator(collection, batch_size=PAGE, filter=which, output_fields=fields)
        try:
            while page := pages.next():
                rows += page
        finally:
            pages.close()
        return rows

    @contextmanager
    def _told(self) -> Iterator[MilvusClient]:
        """The client; what Milvus reports within becomes an error of ours."""
        try:
            yield self.connected()
        except grpc.RpcError as error:
            raise self._away() from error
        except MilvusException as error:
            if error.code == NO_COLLECTION:
                raise NotFound("the index was deleted meanwhile", param="index") from error
            if error.code in (NO_CONNECTION, NOT_LOADED) or isinstance(error.__cause__, grpc.RpcError):
                raise self._away() from error
            raise SmiError(f"Milvus refused (code {error.code})", detail=str(error.message)) from error

    def _away(self) -> Unavailable:
        """The server is away, or has come back: begin anew with it."""
        with self._connecting:
            self._client = None  # other threads may be using it; pymilvus' connections are shared
            self._loaded.clear()
        return Unavailable("the Milvus server does not answer; try again", retry_after=2)

    def connected(self) -> MilvusClient:
        """The client, connected at the first call."""
        with self._connecting:
            if self._client is None:
                # Milvus Lite, in this process, takes pings for an attack and breaks the connection.
                options = {"grpc.keepalive_time_ms": NEVER_MS} if self._lite else {}
                client = MilvusClient(self._uri, token=self._token, timeout=TIMEOUT_S, grpc_options=options)
                if not client.has_collection(CATALOGUE):
                    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
                    schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=64)
                    schema.add_field("owner", DataType.INT64)
                    schema.add_field("info", DataType.JSON)
                    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)  # Milvus wants one
                    self._create(client, CATALOGUE, schema)
                client.load_collection(CATALOGUE)
                self._client = client
            return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _collection(owner: int, name: str) -> str:
    """Milvus' names are narrower than ours."""
    return "smi_" + hashlib.sha256(f"{owner}/{name}".encode()).hexdigest()[:40]


def _key(document: str, number: int) -> str:
    return f"{document}:{number:06}"


def _floats(vectors: str, dimensions: int) -> Any:
    """Float32 array of shape (vectors, dimensions)."""
    raw = base64.b64decode(vectors)
    if len(raw) % (4 * dimensions):
        raise InvalidRequest(f"these vectors do not have the {dimensions} dimensions of the index")
    return numpy.frombuffer(raw, "<f4").reshape(-1, dimensions)


def _row(asked: Put, number: int, vector: Any) -> dict[str, Any]:
    chunk = asked.chunks[number]
    return {
        "id": _key(asked.document, chunk.number),
        "document": asked.document,
        "number": chunk.number,
        "page": chunk.page,
        "start": chunk.start,
        "stop": chunk.end,
        "heading": chunk.heading,
        "text": chunk.text,
        "file": asked.file.model_dump() if asked.file is not None and chunk.number == 0 else None,
        "vector": vector.tolist(),
    }


def _hit(found: Any, names: dict[str, str]) -> Hit:
    row = found["entity"]
    return Hit(
        document=row["document"],
        name=names[row["document"]],
        page=row["page"],
        chunk=row["number"],
        start=row["start"],
        end=row["stop"],
        heading=row["heading"],
        text=row["text"],
        score=max(-1.0, min(1.0, float(found["distance"]))),
    )
