"""/v1/indexes: collections of documents that can be searched and asked. Each key sees its own."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from blocks.storage import Document
from blocks.vectors import DocumentId, File, Index, IndexName
from deployments.api.body import read_body
from deployments.api.docs import takes_form, takes_json
from deployments.api.errors import parse
from deployments.api.forms import fields, file_of, form_of
from deployments.api.live import answered, json_response, live_run, origin
from flows.ask import Asked, AskRequest, ask
from flows.embed import EmbedRequest, embed
from flows.ingest import IngestRequest, ingest
from flows.retrieve import Query, RetrieveRequest, retrieve
from tasks import vectors
from tasks.live import LiveRun, entered

router = APIRouter(prefix="/v1/indexes", tags=["indexes"])
Name = Annotated[IndexName, Path()]
FileId = Annotated[DocumentId, Path()]


class NewIndex(BaseModel):
    """A name, and the embedding model of its vectors: the catalogue's first unless one is named."""

    model_config = ConfigDict(extra="forbid")

    name: IndexName
    model: str = ""


class FileForm(BaseModel):
    """The form's fields besides `file`."""

    name: Annotated[str, Field(max_length=255, description="to be cited by; default: the file's")] = ""


class IndexObject(BaseModel):
    id: str
    object: str = "index"
    model: str
    dimensions: int
    created_at: int

    @classmethod
    def of(cls, index: Index) -> IndexObject:
        return cls(
            id=index.name, model=index.model, dimensions=index.dimensions, created_at=int(index.created)
        )


class FileObject(BaseModel):
    """A document. `pages_without_text` (from 1) say nothing that can be found, as scanned ones do."""

    id: str
    object: str = "index.file"
    filename: str
    content_type: str
    bytes: int
    pages: int
    chunks: int
    pages_without_text: list[int]
    created_at: int

    @classmethod
    def of(cls, file: File) -> FileObject:
        return cls(
            id=file.id,
            filename=file.name,
            content_type=file.content_type,
            bytes=file.bytes,
            pages=file.pages,
            chunks=file.chunks,
            pages_without_text=file.pages_without_text,
            created_at=int(file.created),
        )


class IndexList(BaseModel):
    object: str = "list"
    data: list[IndexObject]


class FileList(BaseModel):
    object: str = "list"
    data: list[FileObject]


class Deleted(BaseModel):
    id: str
    object: str
    deleted: bool = True


def _as_caller(request: Request) -> LiveRun:
    """On behalf of the request's key, but not recorded: for what uses no model."""
    return live_run(request, "indexes")


@router.post("", summary="Make an index", openapi_extra=takes_json(NewIndex))
async def create_index(request: Request) -> IndexObject:
    """The model is asked for a first vector, to see how many dimensions it has."""
    asked = parse(NewIndex, await read_body(request))
    model = await vectors.embedding_model(asked.model)
    wanted = EmbedRequest(model=model.name, input=["dimensions"])
    made, _ = await answered(request, embed, wanted)
    with entered(_as_caller(request)):
        return IndexObject.of(await vectors.create_index(asked.name, model, made.dimensions))


@router.get("", summary="Your indexes")
async def list_indexes(request: Request) -> IndexList:
    with entered(_as_caller(request)):
        return IndexList(data=[IndexObject.of(index) for index in await vectors.list_indexes()])


@router.get("/{name}", summary="One index")
async def get_index(request: Request, name: Name) -> IndexObject:
    with entered(_as_caller(request)):
        return IndexObject.of(await vectors.get_index(name))


@router.delete("/{name}", summary="Delete an index and all in it")
async def delete_index(request: Request, name: Name) -> Deleted:
    with entered(_as_caller(request)):
        await vectors.drop_index(name)
    return Deleted(id=name, object="index.deleted")


@router.post(
    "/{name}/files",
    summary="Add a document",
    openapi_extra=takes_form(FileForm, file="text (UTF-8), Markdown or PDF"),
)
async def add_file(request: Request, name: Name) -> FileObject:
    """The same content again takes the place of what was there. It can be found once this is answered.

    A large document is better added by a job: flow `ingest`.
    """
    async with form_of(request, request.app.state.settings.max_upload) as form:
        asked = fields(form, FileForm, {})
        upload = file_of(form)
        document = Document.upload(upload.file, upload.filename or "")
        wanted = IngestRequest(index=name, file=document, name=asked.name)
        file, _ = await answered(request, ingest, wanted)
    return FileObject.of(file)


@router.get("/{name}/files", summary="The documents of an index, oldest first")
async def list_files(request: Request, name: Name) -> FileList:
    with entered(_as_caller(request)):
        return FileList(data=[FileObject.of(file) for file in await vectors.list_files(name)])


@router.delete("/{name}/files/{file}", summary="Delete a document")
async def delete_file(request: Request, name: Name, file: FileId) -> Deleted:
    with entered(_as_caller(request)):
        await vectors.remove_file(name, file)
    return Deleted(id=file, object="index.file.deleted")


@router.post(
    "/{name}/search",
    summary="Find the passages nearest to a question",
    openapi_extra=takes_json(Query),
    response_model=None,
)
async def search(request: Request, name: Name) -> Response:
    """Best first. `score` is the cosine of question and passage, -1 to 1."""
    asked = parse(Query, await read_body(request))
    found, run = await answered(request, retrieve, RetrieveRequest(index=name, **asked.model_dump()))
    return json_response({"object": "list", "data": found.model_dump()["hits"], "smi": origin(run)}, run)


@router.post(
    "/{name}/ask",
    summary="Answer a question from the documents, with citations",
    openapi_extra=takes_json(Asked),
    response_model=None,
)
async def answer(request: Request, name: Name) -> Response:
    """If no passage reaches `min_score`, the answer says so and `abstained` is true."""
    asked = parse(Asked, await read_body(request))
    found, run = await answered(request, ask, AskRequest(index=name, **asked.model_dump()))
    return json_response({"object": "answer", **found.model_dump(), "smi": origin(run)}, run)
