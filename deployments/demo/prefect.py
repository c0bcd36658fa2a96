"""What Prefect knows of the demo's requests."""

from __future__ import annotations

import time
from typing import Any

import httpx

from blocks.errors import SmiError

RECORD_S = 15


def recorded(up: dict[str, Any], request_id: str) -> str:
    """The request's run in Prefect, once it is complete: name, state, tasks, artifacts and page.

    Raises:
        SmiError: it is not there, complete and with task runs, in time.
    """
    user, _, password = up["prefect_auth"].partition(":")
    until = time.monotonic() + RECORD_S
    with httpx.Client(base_url=up["prefect_url"], auth=(user, password), trust_env=False) as http:
        while True:
            runs = _filtered(http, "flow_runs", {"flow_runs": {"tags": {"all_": [request_id]}}})
            if runs and runs[0]["state_type"] == "COMPLETED":
                of_run = {"flow_runs": {"id": {"any_": [runs[0]["id"]]}}}
                if tasks := _filtered(http, "task_runs", of_run):
                    return _told(up, runs[0], tasks, _filtered(http, "artifacts", of_run))
            if time.monotonic() > until:
                raise SmiError(
                    f"request {request_id} is not in Prefect with its task runs: found {len(runs)}"
                )
            time.sleep(0.3)


def _told(up: dict[str, Any], run: dict[str, Any], tasks: list[Any], artifacts: list[Any]) -> str:
    kinds = ", ".join(sorted(artifact["type"] for artifact in artifacts)) or "none"
    page = f"{up['prefect_url'].removesuffix('/api')}/runs/flow-run/{run['id']}"
    return f"{run['name']}: {run['state_name']}, {len(tasks)} task runs, artifacts: {kinds}\n      {page}"


def _filtered(http: httpx.Client, kind: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.post(f"/{kind}/filter", json=body).raise_for_status().json()
    return found
