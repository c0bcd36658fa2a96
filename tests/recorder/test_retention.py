"""Old records leave, by age and by count; other runs stay."""

import asyncio

from deployments.recorder import retention
from deployments.recorder.calls import Calls
from deployments.recorder.lines import Record
from deployments.recorder.prefect_runs import PrefectRuns
from tasks.live import StepRecord


async def test_the_oldest_live_runs_leave_and_others_stay(prefect, monkeypatch, eventually) -> None:
    # The server is shared: "live" here means live runs of this test's flow.
    monkeypatch.setattr(retention, "TAG", prefect.flow)
    runs = [
        Record(
            number,
            prefect.flow,
            f"req_{number}",
            "first",
            1.0,
            2.0,
            "COMPLETED",
            steps=[StepRecord("generate", 1.0, 2.0)],
        )
        for number in range(8)
    ]
    await PrefectRuns(Calls(prefect.http), prefect.flow).write(runs, [], doubt=False)
    for run in (await prefect.runs())[1:]:
        await prefect.http.patch(f"/flow_runs/{run['id']}", json={"tags": [prefect.flow]})
    untagged, first = (await prefect.runs())[:2]

    async def steps_are_there() -> bool:
        return len(await prefect.steps(first)) == 1

    await eventually(steps_are_there)
    await asyncio.gather(*(retention.clean_up(prefect.http, days=1, most=4) for _ in range(2)))
    assert [run["labels"]["request_id"] for run in await prefect.runs()] == [
        "req_0",
        "req_4",
        "req_5",
        "req_6",
        "req_7",
    ]
    assert await prefect.steps(first) == []
    assert await retention.clean_up(prefect.http, days=1, most=4) == 0
    assert await retention.clean_up(prefect.http, days=1e-6, most=4) == 4
    assert [run["id"] for run in await prefect.runs()] == [untagged["id"]]
