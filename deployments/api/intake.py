"""Taking a job in: its request and files are stored, then its row is committed, then it is accepted."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO

from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.requests import Request

from blocks.errors import InvalidRequest, SmiError
from blocks.storage import CHUNK, Storage
from blocks.validation import path
from deployments.database import unfit
from deployments.jobs.requests import heaviest_model
from deployments.jobs.store import Job, Jobs, Submission
from deployments.jobs.stored import Stored, StoredRequest
from flows.entry import Entry
from flows.kinds import media_in
from tasks.fleet import current_fleet
from tasks.job import Priority


def input_reference(job_id: str, field: str) -> str:
    """Where the upload of a job's field `field` lies. Only we may name a reference: it is read."""
    return f"jobs/{job_id}/inputs/{field}"


async def accept(
    request: Request,
    entry: Entry,
    job_id: str,
    content: BaseModel,
    files: Mapping[str, UploadFile],
    *,
    asked: Any,
    priority: Priority,
) -> Job:
    """Accept a job of flow `entry`; with an Idempotency-Key that was used before, the job of then.

    Args:
        content: the flow's request; its files are named by `input_reference`.
        files: uploads by field.
        asked: what the client sent besides files, as JSON: equal requests have equal ones.

    Raises:
        InvalidRequest: the request itself names a file to read.
        Conflict: the Idempotency-Key was used for another request.
        ModelNotFound: the request names a model that is not there, or is for something else.
    """
    uploads = {input_reference(job_id, field): upload.file for field, upload in files.items()}
    _refuse_foreign(content, uploads)
    fleet, key = await current_fleet(), request.state.key
    job = Submission(
        id=job_id,
        request_id=request.state.request_id,
        key_id=key.id,
        flow=entry.flow.name,
        model=heaviest_model(entry, content, fleet.catalogue),
        priority=priority,
        digest=await _digest(asked, files),
        idempotency_key=_idempotency_key(request),
    )
    stored = StoredRequest(
        principal=key.principal,
        request_id=job.request_id,
        request=content.model_dump(mode="json", exclude_unset=True),
    )
    return await _accepted(fleet.storage, Jobs(request.app.state.engine), job, stored, uploads)


def _refuse_foreign(content: BaseModel, uploads: Collection[str]) -> None:
    """A client's request names no files, neither by reference nor by path: they would be read."""
    for location, media in media_in(content):
        if media.path is not None or media.reference not in uploads:
            param = path(location)
            raise InvalidRequest(f"{param!r} must be a file of the form, not the name of one", param=param)


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest("header Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
    return key


async def _accepted(
    storage: Storage, jobs: Jobs, job: Submission, stored: StoredRequest, uploads: Mapping[str, BinaryIO]
) -> Job:
    """Store the job's files and accept it. They go again unless it is accepted, and as a new one."""
    whole = needed = False
    try:
        await asyncio.to_thread(_store, storage, job.id, stored, uploads)
        whole = True
        accepted = await jobs.add(job)
        needed = accepted.id == job.id
    except BaseException as error:
        # A database that broke off may have accepted it: then they must stay.
        needed = whole and not (isinstance(error, SmiError) or unfit(error))
        raise
    finally:
        if not needed:
            await asyncio.to_thread(storage.remove, f"jobs/{job.id}")
    return accepted


def _store(storage: Storage, job_id: str, stored: StoredRequest, uploads: Mapping[str, BinaryIO]) -> None:
    for reference, file in uploads.items():
        file.seek(0)
        storage.write(reference, file)
    storage.write(Stored.of(job_id).reference, stored.model_dump_json().encode())


async def _digest(asked: Any, files: Mapping[str, UploadFile]) -> str:
    """Equal for equal requests, whatever the order of their parameters."""
    seen = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())

    def add(file: BinaryIO) -> None:
        file.seek(0)
        while block := file.read(CHUNK):
            seen.update(block)

    for name in sorted(files):
        seen.update(name.encode())
        await asyncio.to_thread(add, files[name].file)
    return seen.hexdigest()
