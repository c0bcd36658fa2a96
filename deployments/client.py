"""A small client of our own API, for the command line: hand in a job and wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from blocks.errors import SmiError, from_code

POLL_S = 0.2
OVER = ("succeeded", "failed", "cancelled")


class ApiClient:
    """Calls of `/v1`, with a key.

    Args:
        url: ending in /v1.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """The answer's JSON.

        Raises:
            SmiError: the API's own error, or that it does not answer.
        """
        try:
            answer = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise SmiError(f"{self.url} does not answer ({error}): is `smi up` running?") from None
        if answer.is_success:
            return answer.json()
        try:
            told = answer.json()["error"]
            raise from_code(told["code"], told["message"], param=told["param"])
        except (ValueError, KeyError, TypeError):
            raise SmiError(f"{self.url}{path} answered with HTTP status {answer.status_code}") from None

    def submit(
        self, flow: str, parameters: dict[str, Any], file: Path | None, priority: str, request_id: str | None
    ) -> Any:
        """Hand in a job; it, as the API shows it."""
        headers = {"x-request-id": request_id} if request_id else {}
        if file is None:
            asked = {"flow": flow, "parameters": parameters, "priority": priority}
            return self.call("POST", "/jobs", json=asked, headers=headers)
        fields = {"flow": flow, "parameters": json.dumps(parameters), "priority": priority}
        with file.open("rb") as content:
            return self.call(
                "POST", "/jobs", data=fields, files={"file": (file.name, content)}, headers=headers
            )

    def wait(self, job: Any, told: Callable[[str], None], timeout_s: float = float("inf")) -> Any:
        """The job once it is over; `told` hears each change of its status.

        Raises:
            SmiError: it is not over within the time.
        """
        began, status = time.monotonic(), ""
        while True:
            if job["status"] != status:
                status = job["status"]
                told(f"job {job['id']}: {status} ({time.monotonic() - began:.1f} s)")
            if status in OVER:
                return job
            if time.monotonic() - began > timeout_s:
                raise SmiError(f"job {job['id']} is still {status} after {timeout_s:.0f} s")
            time.sleep(POLL_S)
            job = self.call("GET", f"/jobs/{job['id']}")

    def result(self, job: Any) -> Any:
        """What the job's flow returned. Raises the job's own error if it failed."""
        return self.call("GET", f"/jobs/{job['id']}/result")
