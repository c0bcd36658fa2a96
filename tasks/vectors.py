"""Steps that keep vectors of documents and find the nearest. An index belongs to the key that made it.

What they call is the vectors service (`deployments/vectors/`), at the setting `vectors_url`.
"""

from __future__ import annotations

import re
import time
from typing import Any, TypeVar

import grpc
import grpc.aio
from pydantic import BaseModel

from blocks.catalogue import Model
from blocks.errors import (
    ConfigurationError,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    SmiError,
    Unavailable,
    from_code,
)
from blocks.vectors import (
    AUDIENCE,
    METHOD,
    Chunk,
    Create,
    Fault,
    File,
    Files,
    Hit,
    Hits,
    Index,
    Indexes,
    Nothing,
    OfIndex,
    Owned,
    Put,
    Remove,
    Search,
)
from tasks.chunks import embedded, split
from tasks.dispatch import infer
from tasks.fleet import current_fleet
from tasks.job import Priority, principal, progress
from tasks.protocol.shapes import EmbeddingParameters, EmbeddingResult
from tasks.step import step

A = TypeVar("A", bound=BaseModel)
CALL_S = 60.0
BATCH = 256  # chunks embedded, and chunks stored, at once


async def create_index(name: str, model: Model, dimensions: int) -> Index:
    """A new index for vectors of `model`, an embedding model of the catalogue. Raises `Conflict`."""
    index = Index(
        name=name, model=model.name, source=model.source, dimensions=dimensions, created=time.time()
    )
    return await _call("create", Create(owner=_owner(), index=index), Index)


async def list_indexes() -> list[Index]:
    return (await _call("list", Owned(owner=_owner()), Indexes)).data


async def get_index(name: str) -> Index:
    """Raises `NotFound`, with the names there are."""
    return await _call("get", OfIndex(owner=_owner(), name=name), Index)


async def drop_index(name: str) -> None:
    await _call("drop", OfIndex(owner=_owner(), name=name), Nothing)


async def list_files(name: str) -> list[File]:
    return (await _call("files", OfIndex(owner=_owner(), name=name), Files)).data


async def remove_file(name: str, document: str) -> None:
    """Raises `NotFound` if the index has no such document."""
    await _call("remove", Remove(owner=_owner(), name=name, document=document), Nothing)


class Batch(BaseModel):
    """Chunks and their vectors: base64 of float32, little endian, (chunks, dimensions)."""

    chunks: list[Chunk]
    vectors: str


@step
async def embed_chunks(index: Index, chunks: list[Chunk], priority: Priority | None = None) -> list[Batch]:
    """Vectors of chunks by the index's model; chunks that are too long for it are split further."""
    await check_model(index)
    batches: list[Batch] = []
    waiting, done = chunks, 0
    while waiting:
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        try:
            vectors = await _vectors(index, [embedded(chunk) for chunk in batch], priority)
        except ContextLengthExceeded as error:
            waiting = _shorter(batch, error) + waiting
            continue
        numbered = [chunk.model_copy(update={"number": done + at}) for at, chunk in enumerate(batch)]
        batches.append(Batch(chunks=numbered, vectors=vectors))
        done += len(batch)
        progress("working", done / (done + len(waiting)))
    return batches


async def _vectors(index: Index, texts: list[str], priority: Priority | None) -> str:
    """Vectors by the index's model, in base64."""
    done = await infer("embedding", index.model, EmbeddingParameters(input=texts), priority=priority)
    return EmbeddingResult.model_validate_json(done.result).vectors


def _shorter(batch: list[Chunk], error: ContextLengthExceeded) -> list[Chunk]:
    """The batch with the chunk that was too long, and all that weigh as much, in two."""
    found = re.fullmatch(r"input\[(\d+)\]", error.param or "")
    at = int(found[1]) if found else len(batch)
    least = _weight(batch[at].text) if at < len(batch) else 0
    shorter = [
        piece for chunk in batch for piece in (split(chunk) if _weight(chunk.text) >= least else [chunk])
    ]
    if len(shorter) == len(batch):
        raise error
    return shorter


def _weight(text: str) -> int:
    """Grows as the tokens do: what is not ASCII takes more of them."""
    return len(text) + 3 * sum(not character.isascii() for character in text)


@step
async def store(index: Index, file: File, batches: list[Batch]) -> File:
    """Put a document's chunks into the index, in place of those that it had. It is there once all are."""
    for batch in reversed(batches):
        last = batch is batches[0]
        put = Put(
            owner=_owner(),
            name=index.name,
            created=index.created,
            document=file.id,
            chunks=batch.chunks,
            vectors=batch.vectors,
            file=file if last else None,
        )
        await _call("put", put, Nothing)
    return file


@step
async def search(index: Index, question: str, top_k: int, priority: Priority | None = None) -> list[Hit]:
    """The `top_k` chunks nearest to `question`, best first.

    Raises:
        ContextLengthExceeded: the question is longer than the embedding model reads.
    """
    await check_model(index)
    try:
        vector = await _vectors(index, [question], priority)
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(
            f"the question is longer than model {index.model!r}, by which index {index.name!r} was made, "
            "reads; ask in fewer words"
        ) from error
    asked = Search(owner=_owner(), name=index.name, created=index.created, vector=vector, top_k=top_k)
    return (await _call("search", asked, Hits)).data


async def check_model(index: Index) -> None:
    """Raises `Conflict` if the catalogue's model is not the one that made the index's vectors."""
    try:
        source = (await embedding_model(index.model)).source
    except ModelNotFound:
        source = ""
    if source != index.source:
        raise Conflict(
            f"index {index.name!r} was made with model {index.model!r} from {index.source!r}, which the "
            f"catalogue now {f'takes from {source!r}' if source else 'does not have'}; make a new index "
            "and add the files again",
            param="index",
        )


async def embedding_model(name: str) -> Model:
    """The catalogue's entry of an embedding model; `""` is the first."""
    catalogue = (await current_fleet()).catalogue
    return catalogue.get(name, "embedding") if name else catalogue.default("embedding")


def _owner() -> int:
    return principal().key_id


async def _call(operation: str, asked: BaseModel, shape: type[A]) -> A:
    """One call of the vectors service.

    Raises:
        Unavailable: it does not answer.
        SmiError: what it answered.
    """
    fleet = await current_fleet()
    channel = fleet.client.channel(fleet.settings.vectors)
    call: Any = channel.unary_unary(METHOD + operation)
    body = asked.model_dump_json().encode()
    try:
        answer: bytes = await call(body, metadata=fleet.client.metadata(AUDIENCE), timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        raise _told(error) from error
    if answer[:1] == b"+":
        return shape.model_validate_json(answer[1:])
    fault = Fault.model_validate_json(answer[1:])
    raise from_code(
        fault.code,
        fault.message,
        param=fault.param,
        retry_after=fault.retry_after,
        detail=fault.detail,
    )


def _told(error: grpc.aio.AioRpcError) -> SmiError:
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unavailable(
                "the vectors service (`smi vectors`) does not answer; try again", retry_after=2
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the vectors service did not answer within {CALL_S:.0f} s")
        case grpc.StatusCode.UNAUTHENTICATED:
            return ConfigurationError("the vectors service does not know our join token (SMI_JOIN_TOKEN)")
        case code:
            return SmiError(f"the vectors service answered with gRPC status {code.name}")
