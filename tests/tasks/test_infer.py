"""`infer`: which refusals another node may make good. The nodes are scripts, the loop is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from blocks.catalogue import load_catalogue
from blocks.errors import (
    Busy,
    InvalidRequest,
    ModelNotFound,
    NotAdmitted,
    NotFound,
    OutOfMemory,
    PayloadTooLarge,
    RunnerDied,
    SmiError,
    Unavailable,
)
from blocks.storage import Recording, Storage
from tasks import fleet
from tasks.dispatch import MAX_PARAMETERS, infer
from tasks.fleet import Node, Runner
from tasks.live import LiveRun, entered
from tasks.protocol.client import MAX_MESSAGE, Client
from tasks.protocol.inference_pb2 import Done, Event, Header, Progress, Text
from tasks.protocol.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from tasks.protocol.shapes import ChatParameters, Message, TranscriptionParameters

ASKED = ChatParameters(messages=[Message(role="user", content="x")])
WORD, NEWS = Event(text=Text(text="word ")), Event(progress=Progress(stage="loading"))


class ScriptedFleet:
    """Nodes `a:1` (warm, reached at its runner's socket) and `b:1`; targets answer as the script says."""

    def __init__(self, home: Path, script: dict[str, list[Event | SmiError]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.catalogue, self.storage, self.client = load_catalogue(home), None, self
        warm = Runner("echo", slots=4, socket="/a.sock")
        self.nodes = {
            "a:1": Node("a:1", "cpu", 2**33, 2**33, {"echo": warm}, local=True),
            "b:1": Node("b:1", "cpu", 2**33, 2**33),
        }
        self.script, self.asked = script, list[str]()

    async def run(self, target: str, audience: str, header: Any, media: Any, on_event: Any) -> Done:
        self.asked.append(target)
        for step in self.script.get(target, []):
            if isinstance(step, SmiError):
                raise step
            await on_event(step)
        return Done(finish_reason="stop")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., ScriptedFleet]]:
    before = fleet._current.fleet

    def use(**script: list[Event | SmiError]) -> ScriptedFleet:
        targets = {"socket": "unix:/a.sock", "a": "a:1", "b": "b:1"}
        made = ScriptedFleet(tmp_path, {targets[name]: steps for name, steps in script.items()})
        fleet._current.fleet = made  # type: ignore[assignment]
        return made

    yield use
    fleet._current.fleet = before


async def ask() -> list[str]:
    """Ask for a stream; the texts that came."""
    texts: list[str] = []

    async def on_event(event: Event) -> None:
        if event.WhichOneof("event") == "text":
            texts.append(event.text.text)

    with entered(LiveRun("chat", "req_1")):
        await infer("chat", "echo", ASKED, on_event=on_event)
    return texts


async def test_a_socket_that_is_gone_says_nothing_of_its_node(scripted: Callable[..., ScriptedFleet]) -> None:
    nodes = scripted(socket=[NotAdmitted("gone")], a=[NEWS, WORD])
    assert await ask() == ["word "]
    assert nodes.asked == ["unix:/a.sock", "a:1"]


async def test_a_node_that_refuses_is_passed_over(scripted: Callable[..., ScriptedFleet]) -> None:
    nodes = scripted(socket=[Busy("full")], a=[NEWS, OutOfMemory("full")], b=[WORD])
    assert await ask() == ["word "]
    assert nodes.asked == ["unix:/a.sock", "a:1", "b:1"]


async def test_when_all_refuse_the_last_refusal_is_told(scripted: Callable[..., ScriptedFleet]) -> None:
    scripted(socket=[Busy("one")], a=[Busy("two")], b=[Busy("three", retry_after=9)])
    with pytest.raises(Busy, match="three") as told:
        await ask()
    assert told.value.retry_after == 9


@pytest.mark.parametrize("error", [OutOfMemory("in the midst"), RunnerDied("killed")])
async def test_an_answer_that_has_begun_is_never_begun_again(
    scripted: Callable[..., ScriptedFleet], error: SmiError
) -> None:
    nodes = scripted(socket=[WORD, error], a=[WORD], b=[WORD])
    with pytest.raises(type(error)):
        await ask()
    assert nodes.asked == ["unix:/a.sock"]


async def test_a_node_with_an_older_catalogue_is_passed_over(scripted: Callable[..., ScriptedFleet]) -> None:
    nodes = scripted(socket=[ModelNotFound("no such model")], b=[WORD])
    assert await ask() == ["word "]
    assert nodes.asked == ["unix:/a.sock", "b:1"]
    scripted(socket=[ModelNotFound("no such model")], b=[ModelNotFound("no such model")])
    with pytest.raises(Unavailable, match=r"no node knows model 'echo' yet.*start a:1 anew"):
        await ask()


class Patient(InferenceServicer):  # type: ignore[misc]
    """A node that takes in what comes, and would answer once it has all."""

    async def Run(self, requests: Any, context: Any) -> Any:
        async for _ in requests:
            pass
        yield Event(done=Done(finish_reason="stop"))


@pytest.fixture
async def patient(scripted: Callable[..., ScriptedFleet], tmp_path: Path) -> AsyncIterator[None]:
    """A fleet whose one node is a real gRPC server, with the real client."""
    server, client = grpc.aio.server(), Client("join-token")
    add_InferenceServicer_to_server(Patient(), server)
    name = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    made: Any = scripted()
    made.client, made.storage = client, Storage(f"file://{tmp_path}/storage")
    made.nodes = {name: Node(name, "cpu", 2**33, 2**33)}
    yield
    await client.close()
    await server.stop(0)


async def hear(recording: Recording) -> Done:
    with entered(LiveRun("transcribe", "req_1")):
        return await infer("transcription", "whisper-1", TranscriptionParameters(), media=recording)


@pytest.mark.parametrize(
    ("recording", "kind", "said"),
    [
        (Recording(path="nope.wav"), NotFound, "'nope.wav'"),
        (Recording(path="/"), InvalidRequest, "'/' cannot be read: it is a folder"),
        (Recording(reference="jobs/1/files/x.wav"), NotFound, "'jobs/1/files/x.wav'"),
    ],
)
async def test_media_that_cannot_be_read_is_named(
    patient: None, recording: Recording, kind: type[SmiError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        await asyncio.wait_for(hear(recording), 10)


async def test_media_that_fails_in_the_midst_fails_as_itself(
    patient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(b"x" * 2**20)

    async def chunks(*_: Any) -> AsyncIterator[bytes]:
        yield b"x" * 2**18
        await asyncio.sleep(0.1)
        raise ZeroDivisionError

    assert (await hear(Recording(path=str(tmp_path / "a.wav")))).finish_reason == "stop"
    monkeypatch.setattr(Recording, "chunks", chunks)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(hear(Recording(path=str(tmp_path / "a.wav"))), 10)


async def test_who_waits_for_media_can_be_cancelled(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def chunks(*_: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    monkeypatch.setattr(Recording, "chunks", chunks)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hear(Recording(path="x")), 0.3)


async def test_more_than_one_message_holds_is_told_with_its_size(
    scripted: Callable[..., ScriptedFleet],
) -> None:
    nodes = scripted()
    large = ChatParameters(messages=[Message(role="user", content="x" * MAX_PARAMETERS)])
    with entered(LiveRun("chat", "req_1")), pytest.raises(PayloadTooLarge, match=f"{MAX_PARAMETERS} bytes"):
        await infer("chat", "echo", large)
    assert nodes.asked == []


class Large(InferenceServicer):  # type: ignore[misc]
    async def Ask(self, request: Any, context: Any) -> Event:
        return Event(done=Done(result=bytes(MAX_MESSAGE + 1)))


async def test_an_answer_larger_than_a_message_is_told_so(tmp_path: Path) -> None:
    server, client = grpc.aio.server(options=[("grpc.max_send_message_length", -1)]), Client("join-token")
    add_InferenceServicer_to_server(Large(), server)
    target = f"unix:{tmp_path}/large.sock"
    server.add_insecure_port(target)
    await server.start()
    with pytest.raises(PayloadTooLarge, match="the answer is larger than the 64 MiB"):
        await client.run(target, "large:1", Header(model="echo"))
    await client.close()
    await server.stop(0)
