"""deployments/node/runners.py: loading once, making room, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from live_node import Events, LiveNode, Starter, alive_after, of, stop

from blocks.catalogue import Model
from blocks.errors import LoadFailed, NotAdmitted, OutOfMemory, RunnerDied
from deployments.node import spawn
from deployments.node.ledger import Ledger
from deployments.node.resident import Runner
from deployments.node.runners import Runners
from tasks.protocol.inference_pb2 import (
    LOADING,
    READY,
    DrainRequest,
    NodeState,
    RunnerState,
    UnloadRequest,
    WatchRequest,
)

MIB = 2**20


@pytest.fixture(scope="module")
async def small(start_node: Starter) -> AsyncIterator[LiveNode]:
    """A node of 100 MiB: two of the three big models fit."""
    live = start_node(memory_mib=100)
    yield live
    await live.client.close()


def loaded(models: set[str]):  # type: ignore[no-untyped-def]
    return lambda state: {runner.model for runner in state.runners} == models


async def test_concurrent_first_requests_load_the_model_once(node: LiveNode) -> None:
    answers = await asyncio.gather(*(node.ask("big-b", f"question {number}") for number in range(8)))
    assert answers == [f"question {number}" for number in range(8)]
    # All eight were counted by one process; the log tells of one load.
    await node.runner("big-b", lambda runner: runner.counters["calls"] == 8)
    assert (node.home / "log").read_text().count("big-b is ready") == 1


async def test_a_slow_load_does_not_block_another_model(node: LiveNode) -> None:
    slow = asyncio.create_task(node.ask("slow-load-too"))
    await node.runner("slow-load-too", lambda runner: runner.stage == LOADING)
    assert await node.ask("fast", "meanwhile") == "meanwhile"
    assert not slow.done()
    await slow


async def test_memory_is_reserved_when_loading_starts(small: LiveNode) -> None:
    answers = await asyncio.gather(
        *(small.ask(model) for model in ("big-a", "big-b", "big-c")), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert [type(error) for error in refused] == [OutOfMemory]
    message = str(refused[0])
    assert "0.04 GiB" in message
    assert "loaded are big-" in message
    assert (await small.state()).memory_reserved == 80 * MIB


async def test_a_model_larger_than_the_node_evicts_nothing(small: LiveNode) -> None:
    before = {runner.model for runner in (await small.state()).runners}
    with pytest.raises(OutOfMemory, match=r"huge needs 1.00 GiB"):
        await small.ask("huge")
    assert {runner.model for runner in (await small.state()).runners} == before


async def test_the_least_recently_used_idle_model_makes_room(small: LiveNode) -> None:
    await _only(small, "big-a", "big-b")
    await small.ask("big-a", "used again")
    pid = of(await small.state(), "big-b")[0].pid
    await small.ask("big-c")
    state = await small.state()
    assert {runner.model for runner in state.runners} == {"big-a", "big-c"}
    assert state.memory_reserved == 80 * MIB
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def _only(node: LiveNode, *models: str) -> None:
    stub = node.client.stub(node.name)
    for runner in (await node.state()).runners:
        await stub.Unload(UnloadRequest(model=runner.model), metadata=node.client.metadata(node.name))
    for model in models:
        await node.ask(model)


async def test_a_model_that_works_is_never_evicted_even_for_a_direct_client(small: LiveNode) -> None:
    await _only(small, "big-b", "big-a")
    target = f"unix:{of(await small.state(), 'big-a')[0].socket}"
    events = Events()
    header = small.header("big-a", "word " * 60, stream=True)
    direct = asyncio.create_task(small.run(header, on_event=events, target=target))
    await events.begun.wait()
    await small.ask("big-c")  # evicts big-b, though big-a was used by this node longer ago or not
    assert {runner.model for runner in (await small.state()).runners} == {"big-a", "big-c"}
    await small.ask("big-b")
    assert {runner.model for runner in (await small.state()).runners} == {"big-a", "big-b"}
    await direct
    assert events.text == "word " * 60


async def test_eviction_under_direct_load_loses_no_request(small: LiveNode) -> None:
    """A direct request is answered, or refused as not admitted; it never dies."""
    await _only(small, "big-b", "big-c")
    outcomes: list[str] = []
    over = asyncio.Event()

    async def hammer() -> None:
        while not over.is_set():
            runners = of(await small.state(), "big-c")
            if not runners or runners[0].stage != READY:
                await asyncio.sleep(0.01)
                continue
            try:
                await small.ask("big-c", target=f"unix:{runners[0].socket}")
                outcomes.append("answered")
            except NotAdmitted:
                outcomes.append("refused")

    hammering = asyncio.create_task(hammer())
    for model in ("big-a", "big-b", "big-c") * 3:
        try:
            await small.ask(model)
        except OutOfMemory:
            outcomes.append("full")
    over.set()
    await hammering
    assert "answered" in outcomes


async def test_kill_9_of_the_node_leaves_no_runner_2_s_later(start_node: Starter) -> None:
    live = start_node()
    events = Events()
    streaming = asyncio.create_task(
        live.run(live.header("paced", "word " * 1000, stream=True), on_event=events)
    )
    await asyncio.gather(asyncio.wait_for(events.begun.wait(), 20), live.ask("fast"))
    below = psutil.Process(live.process.pid).children(recursive=True)
    assert len(below) >= 3
    live.process.send_signal(signal.SIGKILL)
    live.process.wait()
    assert not alive_after(below, 2)
    with pytest.raises(RunnerDied):
        await streaming
    await live.client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_lets_work_end_and_stops_everything(
    start_node: Starter, number: signal.Signals
) -> None:
    live = start_node()
    await live.ask("paced", "warm")
    working = asyncio.create_task(live.ask("paced", "word " * 25))
    await live.runner("paced", lambda runner: runner.active == 1)
    below = psutil.Process(live.process.pid).children(recursive=True)
    live.process.send_signal(number)
    with pytest.raises(NotAdmitted):
        await _ask_on(live, "fast")
    assert (await working).startswith("word")
    assert await asyncio.to_thread(live.process.wait, 10) == 0
    assert not alive_after(below, 3)
    assert list((live.home / "run").iterdir()) == []
    await live.client.close()


async def _ask_on(live: LiveNode, model: str) -> None:
    while True:
        await live.ask(model)
        await asyncio.sleep(0.02)


async def test_drain_returns_when_the_last_request_has_ended(start_node: Starter) -> None:
    live = start_node()
    await live.ask("paced", "warm")
    working = asyncio.create_task(live.ask("paced", "word " * 30))
    await live.runner("paced", lambda runner: runner.active == 1)
    began = time.monotonic()
    stub = live.client.stub(live.name)
    await stub.Drain(DrainRequest(deadline_s=10), metadata=live.client.metadata(live.name))
    assert time.monotonic() - began > 0.2
    assert (await live.state()).draining
    assert (await working).startswith("word")
    with pytest.raises(NotAdmitted):
        await live.ask("paced")
    await live.client.close()
    await asyncio.to_thread(stop, live)


# In this process, with real runners below it


@pytest.fixture
async def runners(tmp_path: Path) -> AsyncIterator[Runners]:
    ledger = Ledger(100 * MIB)
    here = Runners(
        name="here:1", token="t", folder=tmp_path, ledger=ledger, changed=lambda: None, preload=False
    )
    yield here
    await here.close(2)


def echo(**options: Any) -> Model:
    return Model(name="echo", task="chat", driver="echo", memory="10MiB", options=options)


async def test_an_unload_whose_caller_leaves_is_seen_through(runners: Runners) -> None:
    runner = await runners.claim(echo())
    runners.release(runner)
    unloading = asyncio.create_task(runners.unload("echo", if_idle=False))
    await asyncio.sleep(0)
    unloading.cancel()
    again = await asyncio.wait_for(runners.claim(echo()), 15)
    assert again is not runner
    assert runner.gone.is_set()


@pytest.mark.parametrize("options", [{}, {"no_such_option": 1}], ids=["unload", "load"])
async def test_a_process_the_kernel_holds_keeps_its_memory_and_nobody_waits(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = echo(**options)
    with monkeypatch.context() as patch:
        patch.setattr(spawn, "GONE_S", 0)
        patch.setattr(spawn.Child, "_alive", lambda child: True)  # as of one in uninterruptible sleep
        if options:
            with pytest.raises(LoadFailed, match="kernel still holds"):
                await asyncio.wait_for(runners.claim(model), 15)
        else:
            await runners.claim(model)
            patch.setattr("deployments.node.runners.UNLOAD_S", 0.1)
            with pytest.raises(LoadFailed, match="kernel still holds"):
                await asyncio.wait_for(runners.unload("echo", if_idle=False), 5)
        (runner,) = runners.all()
        assert runners.ledger.reserved == 10 * MIB
        with pytest.raises(LoadFailed, match="kernel still holds"):
            await asyncio.wait_for(runners.claim(model), 1)
    await asyncio.wait_for(runner.gone.wait(), 5)
    assert runners.ledger.reserved == 0
    assert runners.all() == []


async def test_a_runner_whose_watch_breaks_is_followed_on(runners: Runners, tmp_path: Path) -> None:
    watched = 0

    async def watch(request: WatchRequest, context: Any) -> None:
        nonlocal watched
        watched += 1
        await context.write(NodeState(runners=[RunnerState(active=2 - watched)]))
        if watched == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stalled")
        await asyncio.sleep(60)

    handler = grpc.unary_stream_rpc_method_handler(
        watch, WatchRequest.FromString, NodeState.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("smi.Inference", {"Watch": handler}),)
    )
    server.add_insecure_port(f"unix:{tmp_path}/stalls.sock")
    await server.start()
    runner = Runner(echo(), f"{tmp_path}/stalls.sock")
    runner.stage = READY
    following = asyncio.create_task(runners._follow(runner))
    async with asyncio.timeout(5):
        while not runner.state.active:
            await asyncio.sleep(0.01)
        assert not runner.idle
        while not runner.idle:
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.wait({following})
    await runner.channel.close()
    await server.stop(0)
