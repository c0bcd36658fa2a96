"""Which flows a worker runs, and the body that it gives them.

Anyone who reaches Prefect could name any module; only flows of our own package `flows` are run.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed

import flows
from blocks.errors import PermissionDenied, StorageNotShared
from blocks.storage import Storage
from deployments.jobs.requests import parsed
from deployments.jobs.stored import NOT_SHARED, Failure, OfNoJob, Outcome, Stored, StoredRequest
from deployments.node.local_files import refuse_files
from deployments.node.progress import kept_in
from flows.registry import FLOWS
from tasks.artifacts import progress_shown, show
from tasks.fleet import current_fleet
from tasks.job import JobRun, in_job
from tasks.step import content_free

PACKAGE = Path(flows.__file__).resolve().parent


def flow_at(entrypoint: str | None) -> Flow[..., Any]:
    """The flow that a deployment's entrypoint names: `flows/chat.py:chat` or `flows.chat:chat`.

    Raises:
        PermissionDenied: it is not an async flow of the package `flows`.
    """
    where, _, name = (entrypoint or "").rpartition(":")
    module = _module_at(where) if where.endswith(".py") else where
    parts = module.split(".")
    if len(parts) < 2 or parts[0] != "flows" or not all(part.isidentifier() for part in (*parts, name)):
        raise _refused(entrypoint)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise _refused(entrypoint) from None
    if not isinstance(found, Flow) or not found.fn.__module__.startswith("flows.") or not found.isasync:
        raise _refused(entrypoint)
    return found


def _module_at(path: str) -> str:
    try:
        inside = (PACKAGE.parent / path).resolve().relative_to(PACKAGE)
    except ValueError:
        return ""
    return ".".join(("flows", *inside.with_suffix("").parts))


def _refused(entrypoint: str | None) -> PermissionDenied:
    return PermissionDenied(
        f"entrypoint {entrypoint!r} is refused: this worker runs async flows of the package `flows` only"
    )


@dataclass(slots=True)
class Execution:
    """A flow run in this process, from when it is taken until Prefect knows how it ended."""

    work: asyncio.Task[Any] | None = None
    stopped: Literal["", "cancelled", "shutdown"] = ""
    done: bool = False
    refused: str = ""

    def stop(self, why: Literal["cancelled", "shutdown"]) -> None:
        """End the run; safe before it began and after it ended."""
        self.stopped = self.stopped or why
        if self.work is not None:
            self.work.cancel()

    def end_state(self) -> State[None]:
        """The state of a run whose end Prefect's engine did not report."""
        if self.done:
            return Completed()
        if self.refused:
            return Failed(message=self.refused)
        if self.stopped == "cancelled":
            return Cancelled(message="cancelled on request")
        if self.stopped == "shutdown":
            return Crashed(message="the worker was stopped")
        return Crashed(message="the run lost its worker or its connection to Prefect")


def hosted(flow: Flow[..., Any], execution: Execution, storage: Storage, results: Path) -> Flow[..., Any]:
    """`flow` with a body that can be stopped, resolves a request by reference and stores its result.

    Stopping it never goes through Prefect's engine, which takes a cancelled task for a crash.
    """
    entry = FLOWS.get(flow.name)
    known = entry is not None and entry.flow is flow

    @wraps(flow.fn)
    async def body(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(flow.fn).bind(*args, **kwargs).arguments
        perform = _perform(flow, arguments["request"], storage) if known else flow.fn(**arguments)
        work = execution.work = asyncio.create_task(perform)
        if execution.stopped:
            work.cancel()
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if work.cancelled():
            return execution.end_state()
        error = work.exception()
        if isinstance(error, StorageNotShared):  # the processor cannot read what we would store
            return Failed(name=NOT_SHARED, message=error.message)
        if isinstance(error, Exception):
            raise content_free(error) from None
        execution.done = True
        return work.result()

    copied = copy.copy(flow)
    copied.fn = body
    # Prefect's validation prints the values; its result storage, given here, saves a request per run.
    copied.should_validate_parameters = not known
    copied.persist_result = False
    copied.result_storage = results
    return copied


async def _perform(flow: Flow[..., Any], request: Any, storage: Storage) -> None:
    """Run the flow and store how it ended before Prefect hears of it.

    Raises:
        StorageNotShared: the request was stored on another machine.
    """
    stored = Stored.found_in(request)
    if stored is None:  # from Prefect's UI or a schedule: nobody's key
        outcome: Outcome = OfNoJob(str(flow_run.id))
        run = JobRun(outcome.folder, str(flow_run.name))
    else:
        outcome = stored
        text = await asyncio.to_thread(storage.read_shared, stored.reference)
        asked = StoredRequest.model_validate_json(text)
        request = asked.request
        run = JobRun(stored.folder, asked.request_id, asked.principal, stored.priority)
    try:
        async with kept_in(storage, outcome.progress, run), progress_shown(run):
            content = parsed(FLOWS[flow.name].request, request)
            if stored is None:
                refuse_files(content, (await current_fleet()).settings.local_files)
            with in_job(run):
                result = await flow.fn(content)
    except Exception as error:
        failure = Failure.of(content_free(error)).model_dump_json().encode()
        await asyncio.to_thread(storage.write, outcome.error, failure)
        raise
    await asyncio.to_thread(storage.write, outcome.result, result.model_dump_json().encode())
    result_path = "" if stored is not None else f"/v1/{outcome.folder}/result"
    await show(run, flow.name, result, result_path=result_path)
