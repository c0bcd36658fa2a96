"""What people look at on a run's page in Prefect: texts, pictures, sounds and how far a long step is.

They are for runs of Prefect's engine (jobs, the UI, schedules). Texts and links hold content, which nothing
else in Prefect does, and Prefect repeats them in its events: `SMI_ARTIFACTS=false` turns them off. What
cannot be shown never fails a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import httpx
from prefect.artifacts import (
    Artifact,
    ImageArtifact,
    LinkArtifact,
    MarkdownArtifact,
    ProgressArtifact,
    aupdate_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from pydantic import BaseModel, ValidationError

from blocks.settings import Settings
from blocks.storage import Media
from tasks.fleet import current_fleet
from tasks.job import JobRun, StepProgress
from tasks.links import link

LONG_S = 3.0  # a step that lasts longer shows how far it is
EVERY_S = 2.0
PATIENCE_CANCELLED_S = 0.5
PATIENCE_S = 10.0  # Prefect may take so long before we go on without
LONGEST = 200_000  # characters of a text
# Prefect does not answer, refuses, or answers what its client does not understand.
NOT_SHOWN = (httpx.HTTPError, TimeoutError, PrefectException, ValidationError)

log = logging.getLogger("smi.artifacts")


@runtime_checkable
class Readable(Protocol):
    """A result that people can read."""

    def markdown(self) -> str: ...


async def show(run: JobRun, flow: str, result: BaseModel, *, result_path: str = "") -> None:
    """Put what a flow, or a step of a pipeline, returned on the page of the Prefect run that the code is in,
    if it is in one.

    What was shown before, as the result of a step, is not shown again as a part of the whole.

    Args:
        flow: its name, or the step's.
        result_path: where the API has the whole result, for a run that has no job to ask for it.
    """
    settings = (await current_fleet()).settings
    if not settings.artifacts or flow_run.id is None:
        return
    try:
        async with asyncio.timeout(PATIENCE_S):
            folder = run.folder if run.served else None
            for artifact in artifacts(settings, folder, flow, result, run.shown):
                await artifact.acreate()
            run.shown.append(result)
            if result_path:
                whole = link(settings, result_path)
                await LinkArtifact(
                    key=key(flow, "result"), link=whole, link_text="the whole result"
                ).acreate()
    except NOT_SHOWN as error:
        log.warning("what %s made is not shown in Prefect: %s", flow, type(error).__name__)


def artifacts(
    settings: Settings, folder: str | None, flow: str, result: BaseModel, but: Sequence[object] = ()
) -> Iterator[Artifact]:
    """The artifacts of a result: one per text that is not a part of another, and one per file.

    Args:
        folder: below which the API finds its files; None if it does not, and no link would open.
    """
    for path, part in _parts(result, (), but):
        if isinstance(part, str):
            text = part if len(part) <= LONGEST else f"{part[:LONGEST]}\n\n*(cut here; the result has all)*"
            yield MarkdownArtifact(key=key(flow, *path), markdown=harmless(text))
            continue
        if folder is None:
            continue
        url = link(settings, f"/v1/{folder}/files/{part.name}")
        if part.content_type.startswith("image/"):
            yield ImageArtifact(key=key(flow, *path), image_url=url, description=f"[{part.name}]({url})")
        else:
            yield LinkArtifact(key=key(flow, *path), link=url, link_text=part.name)


Path = tuple[str, ...]


def _parts(
    value: Any, path: Path, but: Sequence[object], told: bool = False
) -> Iterator[tuple[Path, str | Media]]:
    """Texts and files that were made, each with the names of the fields that lead there."""
    if any(value is one for one in but):
        return
    if isinstance(value, Media):
        if value.reference is not None and value.content_type:
            yield path, value
    elif isinstance(value, BaseModel):
        if isinstance(value, Readable) and not told:
            told = True
            yield (*path, type(value).__name__), value.markdown()
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name), (*path, name), but, told)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _parts(inner, (*path, str(name)), but, told)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], BaseModel | Mapping):
        for number, inner in enumerate(value, start=1):
            yield from _parts(inner, (*path, str(number)), but, told)


def key(*names: str) -> str:
    """A key as Prefect takes it: lower case, digits and dashes."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", "-".join(names))
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "result"


def harmless(markdown: str) -> str:
    """`markdown` without tags, and without pictures, which a browser would fetch from wherever they say."""
    return markdown.replace("<", "&lt;").replace("![", "!\\[")


@asynccontextmanager
async def progress_shown(run: JobRun) -> AsyncIterator[None]:
    """Within it, steps of `run` that last longer than 3 s show how far they are. Whoever cancels it does not
    wait for a Prefect that is slow."""
    over = asyncio.Event()
    showing = asyncio.create_task(_show_progress(run, over))
    try:
        yield
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(PATIENCE_CANCELLED_S, showing.cancel)
        raise
    finally:
        over.set()
        await asyncio.wait({showing})
        if not showing.cancelled():
            showing.result()


async def _show_progress(run: JobRun, over: asyncio.Event) -> None:
    shown: dict[int, tuple[UUID, StepProgress, str]] = {}
    last = False
    while not last:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await over.wait()
        last = over.is_set()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _update(run, shown, last)
        except NOT_SHOWN as error:
            log.warning("progress is not shown in Prefect: %s", type(error).__name__)


async def _update(run: JobRun, shown: dict[int, tuple[UUID, StepProgress, str]], last: bool) -> None:
    """Bring what is shown up to date; nothing new begins at the end."""
    for number, step in enumerate(run.steps):
        if number not in shown and not last and step.ended is None and _age(step) > LONG_S:
            made = await ProgressArtifact(
                key=key("progress", step.name), progress=_percent(step), description=_told(step)
            ).acreate()
            shown[number] = made.id, step, _told(step)
        elif number in shown and shown[number][2] != _told(step):
            shown[number] = shown[number][0], step, _told(step)
            await aupdate_progress_artifact(shown[number][0], _percent(step), _told(step))


def _age(step: StepProgress) -> float:
    return time.time() - step.started if step.started is not None else 0.0


def _percent(step: StepProgress) -> float:
    return 100.0 if step.state == "succeeded" else round(100 * min(max(step.fraction, 0.0), 1.0), 1)


def _told(step: StepProgress) -> str:
    stage = step.state if step.ended is not None else step.stage or step.state
    return f"{step.name}: {stage}, {_percent(step):.0f} %"
