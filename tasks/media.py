"""Requests whose answer is bytes: handed to the client that waits, or kept among the job's files."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Container
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, TypeVar, cast

from blocks.storage import Media
from tasks.dispatch import infer
from tasks.fleet import current_fleet
from tasks.job import JobRun, Priority, current_job, current_step
from tasks.live import current, emit
from tasks.protocol.inference_pb2 import Done, Event
from tasks.protocol.shapes import Parameters

IN_MEMORY = 8 << 20
M = TypeVar("M", bound=Media)


@dataclass(frozen=True, slots=True)
class MediaDelta:
    """A piece of a sound or picture as it is made."""

    data: bytes
    content_type: str


async def produce(
    task: str,
    model: str,
    parameters: Parameters,
    *,
    kind: type[M],
    name: str,
    media: Media | None = None,
    priority: Priority | None = None,
    completed: Callable[[BinaryIO], None] | None = None,
) -> tuple[M, Done]:
    """Run one request as `infer` does, and keep the bytes that come as a `kind` called `name`.

    In a live run they are emitted as they come to a client that takes them so, and not kept; for another
    client they are in a temporary file. Otherwise they are stored by reference.

    Args:
        completed: may write into the file what was not known while it came; must not change its size.
    """
    run = current()
    file: BinaryIO | None = None
    if run is None or run.sink is None:
        file = cast(BinaryIO, SpooledTemporaryFile(IN_MEMORY))  # noqa: SIM115 (a live run's outlives this call)
    content_type, size = "", 0

    async def take(event: Event) -> None:
        nonlocal content_type, size
        if event.WhichOneof("event") != "media":
            return
        content_type = event.media.content_type or content_type
        size += len(event.media.data)
        if file is None:
            await emit(MediaDelta(event.media.data, content_type))
        else:
            file.write(event.media.data)

    try:
        done = await infer(task, model, parameters, media=media, on_event=take, priority=priority)
        if file is None:
            return kind(name=name, content_type=content_type, size=size), done
        if completed is not None:
            completed(file)
        if run is not None:
            return kind.upload(file, name, content_type, size), done
        file.seek(0)
        kept = await _keep(file, kind(name=name, content_type=content_type, size=size))
    except BaseException:
        if file is not None:
            file.close()
        raise
    file.close()
    return kept, done


async def _keep(file: BinaryIO, media: M) -> M:
    """Store a file that the current step made: `media` with its reference, and its name below the run's."""
    job, step = current_job(), current_step()
    job = job or JobRun.of_nobody()
    name = _free(posixpath.join(step.name if step is not None else "", media.name), job.kept)
    job.kept[name] = media  # nobody else may take the name meanwhile
    kept = media.model_copy(update={"name": name, "reference": f"{job.folder}/files/{name}"})
    storage = (await current_fleet()).storage
    await asyncio.to_thread(storage.write, str(kept.reference), file)
    job.kept[name] = kept
    return kept


def _free(name: str, taken: Container[str]) -> str:
    stem, extension = posixpath.splitext(name)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{extension}"
    return name
