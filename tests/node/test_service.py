"""deployments/node/service.py and runner.py: requests through a real node and its runners."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import psutil
import pytest
from live_node import TOKEN, Events, LiveNode, of

from blocks.errors import (
    Busy,
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    NotAdmitted,
    RunnerDied,
    SmiError,
    Unavailable,
)
from tasks.protocol.auth import METADATA, call_proof, node_proof
from tasks.protocol.client import RUN, Client
from tasks.protocol.inference_pb2 import HIGH, LOW, READY, Event, Request, UnloadRequest, WatchRequest

LONG = "word " * 2000


async def test_streamed_and_unary_answers_equal_the_question(node: LiveNode) -> None:
    events = Events()
    done = await node.run(node.header("fast", "what  is\n this?", stream=True), on_event=events)
    assert events.text == "what  is\n this?"
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", 3)
    assert await node.ask("fast", "what  is\n this?") == "what  is\n this?"


async def test_unary_sends_exactly_one_event(node: LiveNode) -> None:
    await node.ask("fast")
    socket = (await node.runner("fast")).socket
    for target in (node.name, f"unix:{socket}"):
        call = node.client.channel(target).unary_stream(RUN, Request.SerializeToString, Event.FromString)
        header = node.header("fast")
        events = [e async for e in call(Request(header=header), metadata=node.client.metadata(node.name))]
        assert [event.WhichOneof("event") for event in events] == ["done"]


async def test_direct_call_to_the_runner(node: LiveNode) -> None:
    await node.ask("fast")
    runner = await node.runner("fast", lambda runner: runner.stage == READY)
    assert await node.ask("fast", "directly", target=f"unix:{runner.socket}") == "directly"
    folder = os.stat(os.path.dirname(runner.socket))
    assert folder.st_mode & 0o777 == 0o700


async def test_errors_name_what_would_be_right(node: LiveNode) -> None:
    with pytest.raises(ModelNotFound, match="fast"):
        await node.ask("fsat")
    with pytest.raises(ModelNotFound, match="not transcription"):
        await node.ask("fast", task="transcription")
    with pytest.raises(InvalidRequest) as bad:
        await node.ask("fast", parameters=b'{"messages": []}')
    assert bad.value.param == "messages"
    with pytest.raises(LoadFailed, match=r"tokens_per_minute.*tokens_per_second"):
        await node.ask("misspelt")
    with pytest.raises(LoadFailed, match=r"'incomplete' needs a package.*no_such_package"):
        await node.ask("incomplete")


async def test_a_bug_in_an_adapter_is_neutral_to_the_client_and_logged_without_content(
    node: LiveNode,
) -> None:
    with pytest.raises(SmiError) as told:
        await node.run(node.header("tally", task="tally", parameters=b'{"broken": true}'))
    assert told.value.code == "internal_error"
    assert "secret" not in told.value.message
    log = (node.home / "log").read_text()
    assert "unexpected KeyError" in log
    assert "a secret prompt" not in log.replace('raise KeyError("a secret prompt")', "")


async def test_media_over_the_grpc_limit_of_4_mib_travels_in_chunks(node: LiveNode) -> None:
    block = os.urandom(2**20)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield block

    header = node.header("tally", task="tally", parameters=b"{}", media=True)
    for target in (node.name, f"unix:{(await _loaded(node, 'tally')).socket}"):
        tally = json.loads((await node.run(header, chunks(), target=target)).result)
        assert tally == {"size": 12 * 2**20, "sha256": hashlib.sha256(block * 12).hexdigest()}


async def _loaded(node: LiveNode, model: str):  # type: ignore[no-untyped-def]
    await node.run(node.header(model, task="tally", parameters=b"{}"))
    return await node.runner(model, lambda runner: runner.stage == READY)


async def test_a_slow_reader_of_media_holds_the_sender_back(node: LiveNode) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield bytes(2**20)

    parameters = b'{"pause_s": 0.2}'
    header = node.header("tally", task="tally", parameters=parameters, media=True)
    request = asyncio.create_task(node.run(header, chunks()))
    await asyncio.sleep(1.2)
    held_at = sent
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert held_at < 60


# Who may call


@pytest.mark.parametrize("proof", [None, "", "nonsense", "99999999999.00"])
async def test_missing_or_wrong_proof_is_refused_by_node_and_runner(
    node: LiveNode, proof: str | None
) -> None:
    await node.ask("fast")
    metadata = () if proof is None else ((METADATA, proof),)
    socket = (await node.runner("fast")).socket
    for target in (node.name, f"unix:{socket}"):
        for call in (
            node.client.stub(target).Unload(UnloadRequest(model="fast"), metadata=metadata),
            node.client.stub(target).Watch(WatchRequest(), metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_another_token_another_node_or_an_old_proof_is_refused(node: LiveNode) -> None:
    stranger = Client("another token")
    with pytest.raises(ConfigurationError, match="join token"):
        await stranger.run(node.name, node.name, node.header("fast"))
    await stranger.close()
    stub = node.client.stub(node.name)
    for proof in (call_proof(TOKEN, "127.0.0.1:1"), call_proof(TOKEN, node.name, time.time() - 100)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(WatchRequest(), metadata=((METADATA, proof),)).read()
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_the_first_state_proves_the_token_for_this_nonce_and_name_only(node: LiveNode) -> None:
    stub = node.client.stub(node.name)
    stream = stub.Watch(WatchRequest(nonce=b"once"), metadata=node.client.metadata(node.name))
    first, second = await stream.read(), await stream.read()
    stream.cancel()
    assert first.proof == node_proof(TOKEN, node.name, b"once")
    assert first.proof != node_proof("guessed", node.name, b"once")
    assert not second.proof
    assert (first.name, first.pool, first.memory_total) == (node.name, "cpu", 1000 * 2**20)


async def test_watch_pulses_every_second_and_at_most_20_times_a_second(node: LiveNode) -> None:
    async def count(seconds: float) -> int:
        number = 0
        try:
            async with asyncio.timeout(seconds):
                async for _ in node.states():
                    number += 1
        except TimeoutError:
            pass
        return number

    assert 2 <= await count(2.4) <= 4
    work = asyncio.gather(*(node.ask("paced", "word " * 25) for _ in range(20)))
    busy = await count(1.0)
    await work
    assert 3 <= busy <= 22


# Leaving


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["paced", "threaded"])
@pytest.mark.parametrize("direct", [False, True])
async def test_a_client_that_leaves_is_signalled_to_the_driver_in_100_ms(
    node: LiveNode, model: str, stream: bool, direct: bool
) -> None:
    async with asyncio.timeout(20):
        if model == "paced":
            await node.ask(model)
        else:
            await _cancelled(node, model, True, "", 0)
        before = (await node.runner(model, lambda r: r.stage == READY and not r.active)).counters["cancelled"]
        target = f"unix:{(await node.runner(model)).socket}" if direct else ""
        left = await _cancelled(node, model, stream, target, before)
        after = await node.runner(
            model, lambda r: r.counters["cancelled"] > before and r.active == 0, within_s=2
        )
    assert after.counters["cancelled_at"] - left < 0.1


async def _cancelled(node: LiveNode, model: str, stream: bool, target: str, before: float) -> float:
    """Start a long request, leave it once the driver works; when it was left."""
    events = Events()
    header = node.header(model, LONG, stream=stream)
    request = asyncio.create_task(node.run(header, on_event=events if stream else None, target=target))
    if stream:
        await events.begun.wait()
    else:
        await node.runner(model, lambda runner: runner.active == 1)
    left = time.time()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    return left


@pytest.mark.parametrize("direct", [False, True])
async def test_a_client_that_leaves_while_it_is_slow_to_read_frees_the_slot(
    node: LiveNode, direct: bool
) -> None:
    await node.ask("narrow", "warm")
    target = f"unix:{(await node.runner('narrow')).socket}" if direct else ""
    reading = asyncio.Event()

    async def read(event: Event) -> None:
        reading.set()
        await asyncio.sleep(60)

    header = node.header("narrow", LONG, stream=True)
    request = asyncio.create_task(node.run(header, on_event=read, target=target))
    await reading.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert await asyncio.wait_for(node.ask("narrow", "free again"), 3) == "free again"


async def test_slots_do_not_leak_after_50_cancels(node: LiveNode) -> None:
    await node.ask("narrow", "warm")
    for number in range(50):
        request = asyncio.create_task(node.ask("narrow", LONG))
        await asyncio.sleep(0.002 * (number % 6))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    assert await node.ask("narrow", "free again") == "free again"
    await node.runner("narrow", lambda runner: runner.active == runner.queued == 0, within_s=2)


async def test_a_driver_in_a_thread_keeps_its_slot_until_it_has_really_ended(node: LiveNode) -> None:
    left = await _cancelled(node, "lingering", True, "", 0)
    seen = await node.runner("lingering", lambda r: r.counters["cancelled"] == 1, within_s=2)
    assert seen.active == 1
    over = await node.runner("lingering", lambda r: r.active == 0, within_s=2)
    assert over.counters["ended"] == 1
    assert time.time() - left > 0.45


async def test_a_queued_request_leaves_the_queue_in_100_ms(node: LiveNode) -> None:
    await node.ask("narrow", "warm")
    first = asyncio.create_task(node.ask("narrow", LONG))
    await node.runner("narrow", lambda runner: runner.active == 1)
    second = asyncio.create_task(node.ask("narrow", LONG))
    await node.runner("narrow", lambda runner: runner.queued == 1)
    calls = (await node.runner("narrow")).counters["calls"]
    second.cancel()
    left = time.monotonic()
    await asyncio.gather(second, return_exceptions=True)
    gone = await node.runner("narrow", lambda runner: runner.queued == 0, within_s=2)
    assert time.monotonic() - left < 0.2  # 100 ms, and the pace of Watch on two hops
    assert gone.counters["calls"] == calls
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


# Waiting


async def test_priority_goes_first_and_a_full_queue_is_busy(node: LiveNode) -> None:
    await node.ask("narrow", "warm")
    order: list[str] = []

    async def ask(label: str, priority: int) -> None:
        await node.ask("narrow", label, priority=priority)
        order.append(label)

    first = asyncio.create_task(node.ask("narrow", "word " * 150))  # holds the slot for 3 s
    await node.runner("narrow", lambda runner: runner.active == 1)
    waiting = []
    for number, (label, priority) in enumerate((("low", LOW), ("normal", 0), ("high", HIGH)), 1):
        waiting.append(asyncio.create_task(ask(label, priority)))
        await node.runner("narrow", lambda runner, number=number: runner.queued == number)  # type: ignore[misc]
    with pytest.raises(Busy) as busy:
        await node.ask("narrow")
    assert busy.value.retry_after is not None
    assert busy.value.retry_after >= 1
    await asyncio.gather(first, *waiting)
    assert order == ["high", "normal", "low"]


async def test_deadlines_hold_in_the_queue_and_at_work(node: LiveNode) -> None:
    await node.ask("narrow", "warm")
    before = (await node.runner("narrow")).counters["cancelled"]
    working = asyncio.create_task(node.ask("narrow", LONG, deadline_s=0.6))
    await node.runner("narrow", lambda runner: runner.active == 1)
    with pytest.raises(DeadlineExceeded):
        await node.ask("narrow", deadline_s=0.2)
    with pytest.raises(DeadlineExceeded):
        await working
    free = await node.runner("narrow", lambda runner: runner.active == runner.queued == 0, within_s=2)
    assert free.counters["cancelled"] == before + 1


async def test_while_loading_a_stream_gets_progress_and_a_short_deadline_gets_503(node: LiveNode) -> None:
    async def impatient() -> None:
        await node.ask("slow-load", deadline_s=0.6)

    events = Events()
    patient = asyncio.create_task(
        node.run(node.header("slow-load", stream=True, deadline_s=20), on_event=events)
    )
    with pytest.raises(Unavailable, match="still loading") as early:
        await impatient()
    assert early.value.retry_after
    await patient
    stages = [event.progress.stage for event in events.all if event.HasField("progress")]
    assert stages[0] == "loading"
    assert len(stages) >= 2
    assert events.text == "one two three"


async def test_a_load_beyond_its_timeout_fails_and_gives_its_memory_back(node: LiveNode) -> None:
    reserved = (await node.state()).memory_reserved
    with pytest.raises(LoadFailed, match="load_timeout_s"):
        await node.ask("late")
    after = await node.state()
    assert after.memory_reserved == reserved
    assert not of(after, "late")


# Dying


async def test_kill_9_of_the_runner_mid_stream_gives_an_error_event_and_the_next_request_works(
    node: LiveNode,
) -> None:
    events = Events()
    request = asyncio.create_task(node.run(node.header("paced", LONG, stream=True), on_event=events))
    await events.begun.wait()
    dead = await node.runner("paced", lambda runner: runner.active == 1)
    os.kill(dead.pid, signal.SIGKILL)
    with pytest.raises(RunnerDied):
        await asyncio.wait_for(request, 3)
    assert await node.ask("paced", "anew") == "anew"
    assert (await node.runner("paced")).pid != dead.pid


async def test_a_runner_that_crashes_on_a_request_fails_that_request_only(node: LiveNode) -> None:
    with pytest.raises(RunnerDied):
        await node.ask("crashing", "tick BOOM tock")
    assert await node.ask("crashing", "fine") == "fine"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_runner_died_of_is_not_tried_again_elsewhere(node: LiveNode, stream: bool) -> None:
    """It may have been worked on: only a connection that never came about is `NotAdmitted`."""
    await node.ask("crashing", "fine")
    target = f"unix:{(await node.runner('crashing')).socket}"
    events = Events() if stream else None
    with pytest.raises(RunnerDied):
        await node.run(node.header("crashing", "BOOM", stream=stream), on_event=events, target=target)
    with pytest.raises(NotAdmitted):
        await node.run(node.header("crashing", "fine", stream=stream), on_event=events, target=target)


async def test_unload_returns_when_the_process_is_gone_and_its_memory_free(node: LiveNode) -> None:
    await node.ask("fast")
    before = await node.state(lambda state: bool(of(state, "fast")))
    pid = of(before, "fast")[0].pid
    stub = node.client.stub(node.name)
    await stub.Unload(UnloadRequest(model="fast"), metadata=node.client.metadata(node.name))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    after = await node.state()
    assert not of(after, "fast")
    assert after.memory_reserved == before.memory_reserved - 10 * 2**20
    assert await node.ask("fast", "back") == "back"


async def test_unload_if_idle_is_refused_while_it_works(node: LiveNode) -> None:
    request = asyncio.create_task(node.ask("paced", "word " * 20))
    runner = await node.runner("paced", lambda runner: runner.active == 1)
    for target in (node.name, f"unix:{runner.socket}"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.client.stub(target).Unload(
                UnloadRequest(model="paced", if_idle=True), metadata=node.client.metadata(node.name)
            )
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert (await request).startswith("word")
