"""Where a job's files are, and how a flow run names them.

Content never enters Prefect: a job's flow run has the parameters

    {"request": {"reference": "jobs/job_1/request.json", "attempt": 2, "priority": "low"}}

and the worker that runs it reads the request there and writes `jobs/job_1/2/result.json` or
`jobs/job_1/2/error.json` before Prefect hears how the run ended.
"""

from __future__ import annotations

import posixpath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocks.errors import SmiError, from_code
from tasks.job import Priority
from tasks.principal import Principal


class Stored(BaseModel):
    """A request by reference; it stands where the flow's own request would."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str = Field(pattern=r"^jobs/[A-Za-z0-9_-]+/request\.json$")
    attempt: int = Field(1, ge=1)
    priority: Priority = "normal"

    @classmethod
    def of(cls, job_id: str, attempt: int = 1, priority: Priority = "normal") -> Stored:
        return cls(reference=f"jobs/{job_id}/request.json", attempt=attempt, priority=priority)

    @classmethod
    def found_in(cls, request: Any) -> Stored | None:
        """The reference that a run's parameter `request` is, or None if it is a request itself."""
        try:
            return cls.model_validate(request)
        except ValidationError:
            return None

    @property
    def folder(self) -> str:
        """The reference below which all that is the job's lies."""
        return posixpath.dirname(self.reference)

    @property
    def result(self) -> str:
        return self._beside("result.json")

    @property
    def error(self) -> str:
        return self._beside("error.json")

    def _beside(self, name: str) -> str:
        return posixpath.join(self.folder, str(self.attempt), name)


class StoredRequest(BaseModel):
    """What a job's `request.json` holds: its flow's request, and on whose behalf it runs."""

    model_config = ConfigDict(extra="forbid")

    principal: Principal
    request_id: str
    request: dict[str, Any]


class Failure(BaseModel):
    """What is stored of an error, and what a client is told of it."""

    code: str
    message: str
    param: str | None = None
    retryable: bool = False

    @classmethod
    def of(cls, error: SmiError) -> Failure:
        return cls(code=error.code, message=error.whole, param=error.param, retryable=error.retryable)

    def exception(self) -> SmiError:
        return from_code(self.code, self.message, param=self.param)
