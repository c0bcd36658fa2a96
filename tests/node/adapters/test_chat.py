"""deployments/node/adapters/chat.py over the echo driver."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from blocks.catalogue import Model
from blocks.errors import InvalidRequest
from deployments.node.adapters.chat import ChatAdapter, StopCutter
from deployments.node.drivers.echo import EchoDriver
from tasks.protocol.inference_pb2 import Done, Event
from tasks.protocol.shapes import ChatParameters, ChatResult


async def no_media() -> AsyncIterator[bytes]:
    return
    yield b""


async def ask(text: str, stream: bool = True, **options: object) -> tuple[Done, list[Event], EchoDriver]:
    driver = EchoDriver(Model(name="echo", task="chat", driver="echo"))
    driver.load()
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    parameters = ChatParameters.model_validate({"messages": [{"role": "user", "content": text}], **options})
    done = await ChatAdapter(driver).run(parameters, no_media(), emit if stream else None)
    return done, events, driver


@pytest.mark.parametrize("text", ["one two  three\n four ", "  leading", " ", "naïve 日本語 🙂 ok"])
async def test_deltas_joined_equal_the_message(text: str) -> None:
    done, events, _ = await ask(text)
    assert "".join(event.text.text for event in events) == text
    assert ChatResult.model_validate_json(done.result).text == text
    assert sum(event.text.tokens for event in events) == done.usage.completion_tokens
    assert done.finish_reason == "stop"


async def test_max_tokens_ends_with_length() -> None:
    done, events, _ = await ask("a b c d", max_tokens=2)
    assert [event.text.text for event in events] == ["a", " b"]
    assert (done.finish_reason, done.usage.completion_tokens, done.usage.prompt_tokens) == ("length", 2, 4)


async def test_unary_emits_nothing() -> None:
    done, events, _ = await ask("a b c", stream=False)
    assert events == []
    assert ChatResult.model_validate_json(done.result).text == "a b c"


async def test_stop_sequence_over_two_pieces_cuts_and_ends_the_driver() -> None:
    done, events, driver = await ask("one two three four five", stop=["two thr"])
    assert "".join(event.text.text for event in events) == "one "
    assert ChatResult.model_validate_json(done.result).text == "one "
    assert done.finish_reason == "stop"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 3)
    assert driver.counters["tokens"] == 3
    assert driver.counters["cancelled"] == 0


async def test_only_a_possible_beginning_is_held_back_and_comes_at_the_end() -> None:
    _, events, _ = await ask("x ST", stop=["STOP"])
    assert [event.text.text for event in events] == ["x", " ", "ST"]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["aE", "ND b"], "a"),
        (["aab"], ["aaa", "b"], "a"),
        (["x", "long stop"], ["a long", " st", "x"], "a long st"),
        (["no"], ["yes ", "n", "n"], "yes nn"),
    ],
)
def test_cutter(stops: list[str], pieces: list[str], shown: str) -> None:
    cutter = StopCutter(stops)
    text = ""
    for piece in pieces:
        text += cutter.feed(piece)
    assert text + cutter.rest() == shown


def test_unknown_parameter_is_refused_by_name() -> None:
    adapter = ChatAdapter(EchoDriver(Model(name="echo", task="chat", driver="echo")))
    with pytest.raises(InvalidRequest) as refused:
        adapter.parse(b'{"messages": [{"role": "user", "content": "x"}], "top_k": 3}')
    assert refused.value.param == "top_k"
