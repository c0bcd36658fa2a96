"""deployments/node/drivers/hibari.py, its real voice under the speech adapter; heard by the real tiny.en."""

from __future__ import annotations

import asyncio
import io
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from blocks.catalogue import Model
from blocks.errors import InvalidRequest, LoadFailed
from deployments.node.adapters.audio import decode
from deployments.node.adapters.speech import SpeechAdapter
from deployments.node.drivers.base import Prompt, Working
from deployments.node.drivers.faster_whisper import FasterWhisperDriver
from deployments.node.drivers.hibari import PIECE, HibariDriver, cut
from tasks.protocol.inference_pb2 import Done, Event
from tasks.protocol.shapes import (
    Segment,
    SoundFormat,
    SpeechParameters,
    SpeechResult,
    TranscriptionParameters,
)

SENTENCE = "The old library opens at nine o'clock, and twenty children wait outside the door."
LETTER = (
    "Dr. Miller paid $25 for 3 kg of apples. The train leaves at 7:30 in the morning. "
    "Nobody had seen the river so high since 1987! Was the bridge still safe? "
    "They walked home along the old railway, past the mill and the empty school.\n\nIt rained all night."
)
HEARD = (
    "doctor miller",
    "25",
    "apples",
    "train",
    "morning",
    "1987",
    "bridge",
    "past the mill",
    "rained all night",
)


async def no_media() -> AsyncIterator[bytes]:
    return
    yield b""


async def say(driver: HibariDriver, text: str, **options: Any) -> tuple[Done, list[Event]]:
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    parameters = SpeechParameters(input=text, **options)
    return await SpeechAdapter(driver).run(parameters, no_media(), emit), events


def sound_of(events: list[Event]) -> bytes:
    return b"".join(event.media.data for event in events)


def heard(whisper: FasterWhisperDriver, sound: bytes) -> str:
    """What is said in a file, in lower case and digits."""
    samples = io.BytesIO()
    list(decode(io.BytesIO(sound), samples, whisper.sample_rate, threading.Event()))
    audio = np.frombuffer(samples.getvalue(), np.float32)
    segments = whisper.run(audio, TranscriptionParameters(), threading.Event())
    text = "".join(part.text for part in segments if isinstance(part, Segment)).lower()
    text = (
        text.replace("dr.", "doctor")
        .replace("nine", "9")
        .replace("twenty", "20")
        .replace("9:00", "9 o'clock")
    )
    return " ".join(re.sub(r"[^a-z0-9' ]", " ", text).split())


@pytest.mark.parametrize("kind", ["wav", "mp3", "opus", "flac", "aac"])
async def test_what_is_said_is_heard(
    hibari: HibariDriver, whisper: FasterWhisperDriver, kind: SoundFormat
) -> None:
    done, events = await say(hibari, SENTENCE, voice="nova", response_format=kind)
    said = "the old library opens at 9 o'clock and 20 children wait outside the door"
    assert heard(whisper, sound_of(events)) == said
    result = SpeechResult.model_validate_json(done.result)
    assert 4 < result.seconds < 8
    assert {event.media.content_type for event in events if event.HasField("media")} == {result.content_type}


async def test_every_sentence_is_said(hibari: HibariDriver, whisper: FasterWhisperDriver) -> None:
    _, events = await say(hibari, LETTER, response_format="flac")
    text = heard(whisper, sound_of(events))
    at = [text.find(part) for part in HEARD]
    assert -1 not in at, text
    assert at == sorted(at)


@pytest.mark.parametrize("kind", get_args(SoundFormat))
async def test_the_sound_comes_while_it_is_made(hibari: HibariDriver, kind: SoundFormat) -> None:
    """The first bytes come after one sentence of six, and progress with every one."""
    done, events = await say(hibari, f"{SENTENCE} " * 6, response_format=kind)
    kinds = [event.WhichOneof("event") for event in events]
    first = sound_of(events[: kinds.index("progress")])
    assert len(sound_of(events)) / 8 < len(first) < len(sound_of(events)) / 5
    fractions = [event.progress.fraction for event in events if event.HasField("progress")]
    assert fractions == pytest.approx([part / 6 for part in range(1, 7)])
    assert done.usage.audio_seconds == SpeechResult.model_validate_json(done.result).seconds
    if kind == "pcm":
        assert len(sound_of(events)) == 2 * round(done.usage.audio_seconds * 24_000)


async def test_speed(hibari: HibariDriver) -> None:
    seconds = {}
    for speed in (0.25, 0.5, 1.0, 2.0):
        done, _ = await say(hibari, SENTENCE, response_format="pcm", speed=speed)
        seconds[speed] = done.usage.audio_seconds
    for speed, took in seconds.items():
        assert took == pytest.approx(seconds[1] / speed, rel=0.12)
    with pytest.raises(InvalidRequest, match="up to 2, not 3") as refused:
        await say(hibari, SENTENCE, speed=3)
    assert refused.value.param == "speed"


async def test_the_same_request_gives_the_same_sound(hibari: HibariDriver) -> None:
    first, again = [sound_of((await say(hibari, SENTENCE))[1]) for _ in range(2)]
    assert first == again


@pytest.mark.parametrize("text", ["😀", "...", " \n ", "\u200b", "—"])
async def test_nothing_to_say(hibari: HibariDriver, text: str) -> None:
    with pytest.raises(InvalidRequest, match="nothing that could be said") as refused:
        await say(hibari, text)
    assert refused.value.param == "input"


async def test_another_script_is_refused_before_anything_is_said(hibari: HibariDriver) -> None:
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    parameters = SpeechParameters(input=f"{SENTENCE} {SENTENCE} Привет.")
    with pytest.raises(InvalidRequest, match="English only") as refused:
        await SpeechAdapter(hibari).run(parameters, no_media(), emit)
    assert (refused.value.param, events) == ("input", [])
    assert "П" not in refused.value.message


async def test_voices(hibari: HibariDriver) -> None:
    assert hibari.voices[0] == "heart"
    assert {"alloy", "echo", "fable", "onyx", "nova", "shimmer"} <= set(hibari.voices)
    with pytest.raises(InvalidRequest, match="no voice 'bob'; it has: heart, alloy") as refused:
        await say(hibari, SENTENCE, voice="bob")
    assert refused.value.param == "voice"


def test_a_voice_that_hibari_does_not_have() -> None:
    model = Model(name="odd", task="speech", driver="hibari", options={"voices": {"alloy": "hart"}})
    with pytest.raises(LoadFailed, match=r"'hart'.*it has: heart, emma"):
        HibariDriver(model).load()


def test_a_voice_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("HIBARI_HOME", str(tmp_path))
    monkeypatch.setattr("hibari.voices.BASE_URL", "http://127.0.0.1:9/")
    model = Model(name="odd", task="speech", driver="hibari", options={"voices": {"fable": "fable"}})
    with pytest.raises(LoadFailed, match="voice 'fable' cannot be loaded"):
        HibariDriver(model).load()


def test_pieces_are_short_and_nothing_is_left_out(hibari: HibariDriver) -> None:
    clauses = "wˈʌn tˈu, " * 30
    pieces = list(cut(clauses, 40))
    assert all(len(piece) <= 40 for piece in pieces)
    assert all(piece.endswith(",") for piece in pieces[:-1])
    for phonemes in (clauses, "wˈʌn " * 100, "a" * 333):
        pieces = list(cut(phonemes, 40))
        assert all(len(piece) <= 40 for piece in pieces)
        assert "".join(pieces).replace(" ", "") == phonemes.replace(" ", "")


def test_a_text_of_one_endless_sentence_comes_in_short_pieces(hibari: HibariDriver) -> None:
    text = ("and so on " * 410)[:4096]
    made = list(hibari.run(SpeechParameters(input=text, voice="heart"), threading.Event()))
    assert isinstance(made[0], Prompt)
    pieces = [item for item in made[1:] if not isinstance(item, Working)]
    assert len(pieces) >= made[0].tokens / PIECE
    assert max(map(len, pieces)) < 15 * hibari.sample_rate


@pytest.mark.parametrize("text", ["9" * 400, "x" * 4000, "1,2,3,4," * 500, "A1b2" * 1000, "$" * 500 + "5"])
def test_odd_texts_are_said(hibari: HibariDriver, text: str) -> None:
    made = list(hibari.run(SpeechParameters(input=text[:1000], voice="heart"), threading.Event()))
    assert sum(len(item) for item in made if not isinstance(item, (Prompt, Working))) > hibari.sample_rate


@pytest.mark.parametrize("text", ["a/", "1a", "1st", "&"])
def test_a_text_without_spaces_does_not_hold_the_voice(hibari: HibariDriver, text: str) -> None:
    """600 characters of `a/` took 30 s, and the time grew with their third power."""
    began = time.process_time()
    pieces = hibari._pieces(hibari._speakers["heart"], text * (4096 // len(text)), PIECE, threading.Event())
    assert list(pieces)
    assert time.process_time() - began < 12


async def test_it_stops_between_two_pieces(hibari: HibariDriver) -> None:
    begun = asyncio.Event()

    async def emit(event: Event) -> None:
        begun.set()

    calls, cancelled, said = (hibari.counters[name] for name in ("calls", "cancelled", "tokens"))
    parameters = SpeechParameters(input=f"{SENTENCE} " * 45, speed=0.25)
    task = asyncio.create_task(SpeechAdapter(hibari).run(parameters, no_media(), emit))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hibari.counters["tokens"] - said < 10 * PIECE  # of more than 30
    assert (hibari.counters["calls"], hibari.counters["cancelled"]) == (calls + 1, cancelled + 1)


async def test_a_slow_client_holds_the_voice_back(hibari: HibariDriver) -> None:
    """Else all of a long text would lie in memory as samples."""
    before = hibari.counters["tokens"]
    wait = asyncio.Event()

    async def emit(event: Event) -> None:
        await wait.wait()

    parameters = SpeechParameters(input=f"{SENTENCE} " * 45)
    task = asyncio.create_task(SpeechAdapter(hibari).run(parameters, no_media(), emit))
    said = 0.0
    while not said or said != hibari.counters["tokens"] - before:  # until it says no more
        said = hibari.counters["tokens"] - before
        await asyncio.sleep(0.5)
    assert said < 6 * PIECE
    wait.set()
    await task
