"""How far a run is, on storage that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocks.storage import Storage
from deployments.node.progress import kept_in
from tasks.job import JobRun, in_job, in_step


class Refused(Exception):
    """As a bucket's client raises its own."""


class Bucket(Storage):
    """Takes nothing the first time."""

    refusals = 1

    def write(self, reference: str, content: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Refused
        super().write(reference, content)  # type: ignore[arg-type]


@pytest.mark.parametrize("refusals", [1, 100])
async def test_storage_that_refuses_does_not_hide_how_the_run_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refusals: int
) -> None:
    storage, run = Bucket(f"file://{tmp_path}"), JobRun("jobs/job_1")
    storage.refusals = refusals

    async def perform() -> None:
        async with kept_in(storage, "jobs/job_1/1/progress.json", run):
            with in_job(run), in_step(run, "generate"):
                raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        await perform()
    assert "cannot be written: Refused" in caplog.text
