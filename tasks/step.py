"""`@step`: a Prefect task that also works inside a live run.

In a live run it runs at once and notes itself in the run's record; anywhere else it is an ordinary
Prefect task, with retries, states and a place in the UI, and in a job its progress is noted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import NO_CACHE

from blocks.errors import SmiError, from_code
from tasks.job import JobRun, StepError, current_job, current_step, in_step
from tasks.live import LiveRun, StepRecord, current

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("smi.steps")


class Step(Task[P, Coroutine[Any, Any, R]]):
    """A `prefect.Task` over an async function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        run, job = current(), current_job()
        if run is not None:
            return self._live(run, *args, **kwargs)
        if job is not None and current_step() is None:
            return self._in_job(job, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    async def _in_job(self, job: JobRun, *args: P.args, **kwargs: P.kwargs) -> R:
        with in_step(job, self.name) as record:
            try:
                result = await super().__call__(*args, **kwargs)
            except asyncio.CancelledError:
                record.state = "cancelled"
                raise
            except BaseException as error:
                record.state, record.error = "failed", StepError.of(error)
                raise
            record.state, record.fraction = "succeeded", 1.0
            return result

    async def _live(self, run: LiveRun, *args: P.args, **kwargs: P.kwargs) -> R:
        record = StepRecord(self.name, time.time())
        run.steps.append(record)
        try:
            return await self.fn(*args, **kwargs)
        except asyncio.CancelledError:
            record.state = "CANCELLED"
            raise
        except BaseException as error:
            record.state, record.message = "FAILED", told(error)
            raise
        finally:
            record.ended = time.time()


def told(error: BaseException) -> str:
    """What a record may say of an error: an `SmiError`'s message is made for it; of others only the type."""
    return f"{error.code}: {error.message}" if isinstance(error, SmiError) else type(error).__name__


def content_free(error: Exception) -> SmiError:
    """`error` as Prefect's states and logs may show it: they print messages and chained errors in full.

    The lines of code that it came through go to this process's log.
    """
    if isinstance(error, SmiError):
        return from_code(
            error.code,
            error.message,
            param=error.param,
            retry_after=error.retry_after,
            detail=error.detail,
            retryable=error.retryable,
        )
    log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return SmiError(f"unexpected {type(error).__name__}; the log of the process that ran it says where")


def step(fn: Callable[P, Coroutine[Any, Any, R]], **options: Any) -> Step[P, R]:
    """Declare a step. Inputs are not hashed (they are content) and results not kept by Prefect.

    Args:
        options: of `prefect.Task`, such as `name` and `retries`.
    """

    @wraps(fn)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await fn(*args, **kwargs)
        except Exception as error:
            if current() is not None:
                raise
            raise content_free(error) from None

    return Step(guarded, cache_policy=NO_CACHE, persist_result=False, **options)
