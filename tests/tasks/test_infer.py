"""`infer`: which refusals another node may make good. The nodes are scripts, the loop is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocks.catalogue import load_catalogue
from blocks.errors import Busy, ModelNotFound, NotAdmitted, OutOfMemory, RunnerDied, SmiError, Unavailable
from tasks import fleet
from tasks.dispatch import infer
from tasks.fleet import Node, Runner
from tasks.live import LiveRun, entered
from tasks.protocol.inference_pb2 import Done, Event, Progress, Text
from tasks.protocol.shapes import ChatParameters, Message

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
