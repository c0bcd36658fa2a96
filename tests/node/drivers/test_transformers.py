"""deployments/node/drivers/transformers.py with the real SmolLM2-135M, alone and under the chat adapter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from blocks.errors import ContextLengthExceeded
from deployments.node.adapters.chat import ChatAdapter
from deployments.node.drivers.base import End, Piece, Prompt
from deployments.node.drivers.transformers import CHUNK, TransformersDriver
from tasks.protocol.inference_pb2 import Done, Event
from tasks.protocol.shapes import ChatParameters, ChatResult


def asked(text: str, **fields: Any) -> ChatParameters:
    return ChatParameters.model_validate({"messages": [{"role": "user", "content": text}], **fields})


def answer(driver: TransformersDriver, parameters: ChatParameters) -> tuple[str, End, list[Piece]]:
    prompt, *items = driver.run(parameters, threading.Event())
    pieces, end = items[:-1], items[-1]
    assert isinstance(prompt, Prompt)
    assert isinstance(end, End)
    assert prompt.tokens == end.prompt_tokens
    whole = [piece for piece in pieces if isinstance(piece, Piece)]
    assert len(whole) == len(pieces)
    return "".join(piece.text for piece in whole), end, whole


async def no_media() -> AsyncIterator[bytes]:
    return
    yield b""


async def chat(driver: TransformersDriver, parameters: ChatParameters) -> tuple[str, Done, list[Event]]:
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    done = await ChatAdapter(driver).run(parameters, no_media(), emit)
    return ChatResult.model_validate_json(done.result).text, done, events


def generated(driver: TransformersDriver, parameters: ChatParameters) -> list[int]:
    """What transformers' own greedy `generate` makes of it, without the end token."""
    inputs = driver.tokenizer.apply_chat_template(
        [message.model_dump(exclude_none=True) for message in parameters.messages],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = driver.network.generate(**inputs, max_new_tokens=parameters.max_tokens, do_sample=False)
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return [token for token in tokens if token != driver.tokenizer.eos_token_id]


@pytest.mark.parametrize("text", ["What is the capital of France?", "Repeat: 🙂 日本 é"])
def test_text_and_usage_are_those_of_generate(smollm: TransformersDriver, text: str) -> None:
    parameters = asked(text, temperature=0, max_tokens=24)
    tokens = generated(smollm, parameters)
    said, end, pieces = answer(smollm, parameters)
    assert said == smollm._text(tokens).rstrip("\ufffd")
    assert end.completion_tokens == len(tokens) == sum(piece.tokens for piece in pieces)
    assert "\ufffd" not in said


def test_the_capital_of_france(smollm: TransformersDriver) -> None:
    said, end, _ = answer(smollm, asked("What is the capital of France?", temperature=0))
    assert "Paris" in said
    assert end.finish_reason == "stop"


def test_the_system_message_is_heard(smollm: TransformersDriver) -> None:
    turns = [
        {"role": "developer", "content": "You are Ada, a bot."},
        {"role": "user", "content": "Your name?"},
    ]
    as_system = [{**turns[0], "role": "system"}, turns[1]]
    prompts = [
        smollm.tokenizer.decode(smollm._tokens(ChatParameters.model_validate({"messages": messages})))
        for messages in (turns, as_system)
    ]
    assert prompts[0] == prompts[1]
    assert "<|im_start|>system\nYou are Ada, a bot.<|im_end|>" in prompts[0]
    assert prompts[0].endswith("<|im_start|>assistant\n")


def test_max_tokens_ends_with_length(smollm: TransformersDriver) -> None:
    _, end, _ = answer(smollm, asked("Tell me a long story.", temperature=0, max_tokens=5))
    assert (end.finish_reason, end.completion_tokens) == ("length", 5)


def test_without_max_tokens_the_context_is_the_limit(
    smollm: TransformersDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm, "context", 60)
    _, end, _ = answer(smollm, asked("Tell me a long story.", temperature=0))
    assert end.finish_reason == "length"
    assert end.prompt_tokens + end.completion_tokens == 60


def test_context_overflow_names_both_numbers(smollm: TransformersDriver) -> None:
    """litellm#10793."""
    long = asked("word " * 3000)
    count = len(smollm._tokens(long))
    with pytest.raises(ContextLengthExceeded, match=rf"context of 2048 tokens.* {count} tokens") as caught:
        answer(smollm, long)
    assert caught.value.param == "messages"
    with pytest.raises(ContextLengthExceeded, match=r"context of 2048.*an answer of 2040") as caught:
        answer(smollm, asked("Hello", max_tokens=2040))
    assert caught.value.param == "max_tokens"


def test_seed_temperature_and_top_p(smollm: TransformersDriver) -> None:
    def said(**fields: Any) -> str:
        return answer(smollm, asked("Write a short poem.", max_tokens=12, **fields))[0]

    assert said(seed=3, temperature=1) == said(seed=3, temperature=1)
    assert said(seed=3, temperature=1) != said(seed=4, temperature=1)
    assert said(seed=3, temperature=1, top_p=1e-6) == said(temperature=0)


async def test_stop_sequences_end_the_work_and_usage_is_exact(smollm: TransformersDriver) -> None:
    """litellm#20711: stop and max_tokens are not passed on."""
    parameters = asked("Count: one, two, three, four, five.", temperature=0, max_tokens=40)
    whole, _, _ = await chat(smollm, parameters)
    words = whole.split(" ")
    stop = f" {words[2]} {words[3]}"
    before = smollm.counters["tokens"]
    cancelled = smollm.counters["cancelled"]
    text, done, events = await chat(smollm, parameters.model_copy(update={"stop": [stop]}))
    assert text == whole[: whole.index(stop)]
    assert "".join(event.text.text for event in events) == text
    assert done.finish_reason == "stop"
    assert smollm.counters["tokens"] - before == done.usage.completion_tokens < 40
    assert done.usage.prompt_tokens == len(smollm._tokens(parameters))
    assert smollm.counters["cancelled"] == cancelled


async def cancel_after(driver: TransformersDriver, parameters: ChatParameters, seconds: float) -> float:
    """Seconds from cancelling until the driver has really ended."""
    task = asyncio.create_task(chat(driver, parameters))
    await asyncio.sleep(seconds)
    assert not task.done()
    before, start = driver.counters["cancelled"], time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver.counters["cancelled"] == before + 1
    return time.monotonic() - start


@pytest.mark.parametrize("text", ["word " * 1900, "Tell me a long story."], ids=["prefill", "mid-stream"])
async def test_who_leaves_frees_the_model(smollm: TransformersDriver, text: str) -> None:
    """litellm#37140, lemonade#3133, LitServe#48: the GPU goes on, in the prefill phase above all."""
    tokens = smollm.counters["tokens"]
    took = [await cancel_after(smollm, asked(text), 0.4) for _ in range(3)]
    assert min(took) < 0.1, took
    if text.startswith("word"):
        assert smollm.counters["tokens"] == tokens, "still reading the prompt"
    said, _, _ = answer(smollm, asked("What is the capital of France?", temperature=0, max_tokens=8))
    assert "Paris" in said


def test_a_prompt_read_in_chunks_gives_the_same_answer(
    smollm: TransformersDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = asked("The password is swordfish. " + "So it goes. " * 40 + "What is the password?",
                       temperature=0, max_tokens=8)  # fmt: skip
    assert len(smollm._tokens(parameters)) < CHUNK
    at_once = answer(smollm, parameters)[0]
    monkeypatch.setattr("deployments.node.drivers.transformers.CHUNK", 50)
    assert answer(smollm, parameters)[0] == at_once
