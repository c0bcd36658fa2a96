"""A small client of our own API, for the command line: hand in a job and wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
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

    def submit_pipeline(
        self,
        text: str,
        values: dict[str, str],
        files: dict[str, Path],
        priority: str,
        request_id: str | None = None,
    ) -> Any:
        """Hand in a pipeline with its inputs; the job, as the API shows it."""
        headers = {"x-request-id": request_id} if request_id else {}
        fields = {"pipeline": text, "priority": priority}
        fields |= {f"inputs.{name}": value for name, value in values.items()}
        with ExitStack() as opened:
            uploads: dict[str, Any] = {name: (None, value) for name, value in fields.items()}
            for name, path in files.items():
                uploads[f"inputs.{name}"] = (path.name, opened.enter_context(path.open("rb")))
            return self.call("POST", "/pipelines", files=uploads, headers=headers)

    def transcribe(self, file: Path, model: str) -> str:
        """What is said in a recording, live."""
        with file.open("rb") as content:
            form = {"file": (file.name, content)}
            said = self.call("POST", "/audio/transcriptions", data={"model": model}, files=form)
        return str(said["text"])

    def wait(self, job: Any, told: Callable[[str], None], timeout_s: float = float("inf")) -> Any:
        """The job once it is over; `told` hears each change of its status, and of its steps'.

        Raises:
            SmiError: it is not over within the time.
        """
        began, status = time.monotonic(), ""
        steps: dict[str, str] = {}
        while True:
            for step in job.get("steps", []):
                if steps.get(step["name"]) != step["status"]:
                    steps[step["name"]] = step["status"]
                    why = f": {step['error']['message']}" if step["error"] else ""
                    told(f"  {step['name']}: {step['status']}{why} ({time.monotonic() - began:.1f} s)")
            if job["status"] != status:
                status = job["status"]
                told(f"job {job['id']}: {status} ({time.monotonic() - began:.1f} s)")
            if status in OVER:
                return job
            if time.monotonic() - began > timeout_s:
                raise SmiError(f"job {job['id']} is still {status} after {timeout_s:.0f} s")
            time.sleep(POLL_S)
            job = self.call("GET", f"/jobs/{job['id']}")

    def download(self, job: Any, folder: Path) -> list[Path]:
        """Write the files that the job made below `folder`; where they are."""
        written = []
        for file in self.call("GET", f"/jobs/{job['id']}")["files"]:
            path = folder / file["name"]
            if not path.resolve().is_relative_to(folder.resolve()):
                raise SmiError(f"the job's file {file['name']!r} would lie outside of {folder}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._save(f"/jobs/{job['id']}/files/{file['name']}", path)
            written.append(path)
        return written

    def _save(self, url: str, path: Path) -> None:
        try:
            with self._http.stream("GET", url) as answer, path.open("wb") as target:
                if not answer.is_success:
                    raise SmiError(f"{self.url}{url} answered with HTTP status {answer.status_code}")
                for block in answer.iter_bytes():
                    target.write(block)
        except httpx.HTTPError as error:
            raise SmiError(f"{self.url} broke off ({error}) while it sent {path.name}") from None

    def result(self, job: Any) -> Any:
        """What the job's flow returned. Raises the job's own error if it failed."""
        return self.call("GET", f"/jobs/{job['id']}/result")
