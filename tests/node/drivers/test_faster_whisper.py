"""deployments/node/drivers/faster_whisper.py with the real tiny.en, under the transcription adapter."""

from __future__ import annotations

import asyncio
import io
import re
import time
import wave
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocks.errors import InvalidMedia, InvalidRequest, PayloadTooLarge
from deployments.node.adapters import transcription
from deployments.node.adapters.transcription import TranscriptionAdapter
from deployments.node.drivers import faster_whisper
from deployments.node.drivers.faster_whisper import FasterWhisperDriver, windows
from tasks.protocol.inference_pb2 import Done, Event
from tasks.protocol.shapes import TranscriptionParameters, TranscriptionResult

SPEECH = Path(__file__).parents[2] / "data" / "speech"
CLIPS = sorted(SPEECH.glob("austen-*.wav"))
RATE = 16_000
SAID = " ".join(clip.with_suffix(".txt").read_text() for clip in CLIPS)


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z ]", " ", text.lower().replace("mr.", "mister").replace("-", " ")).split()


def error_rate(heard: str, said: str) -> float:
    """Word error rate: edits over the words that were said."""
    one, other = words(heard), words(said)
    row = list(range(len(other) + 1))
    for at, word in enumerate(one, 1):
        before, row = row, [at]
        for to, right in enumerate(other, 1):
            row.append(min(before[to] + 1, row[-1] + 1, before[to - 1] + (word != right)))
    return row[-1] / len(other)


def samples(clip: Path) -> Any:
    with wave.open(str(clip)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def as_wav(audio: Any) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(audio.astype("<i2").tobytes())
    return out.getvalue()


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 65536):
        yield data[at : at + 65536]


async def hear(
    driver: FasterWhisperDriver, data: bytes, **fields: Any
) -> tuple[TranscriptionResult, Done, list[Event]]:
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    parameters = TranscriptionParameters.model_validate(fields)
    done = await TranscriptionAdapter(driver).run(parameters, chunks(data), emit)
    return TranscriptionResult.model_validate_json(done.result), done, events


async def test_the_transcripts_are_right(whisper: FasterWhisperDriver) -> None:
    """Tiny.en mishears one of the 41 words ("ill-disposed")."""
    heard = []
    for clip in CLIPS:
        result, done, events = await hear(whisper, clip.read_bytes())
        heard.append(result.text)
        assert result.language == "en"
        assert result.duration == done.usage.audio_seconds == len(samples(clip)) / RATE
        assert "".join(event.text.text for event in events) == result.text == result.text.strip()
        assert all(0 <= part.start < part.end <= result.duration + 0.5 for part in result.segments)
    assert error_rate(" ".join(heard), SAID) <= 0.06


async def test_nothing_is_made_up_on_silence(whisper: FasterWhisperDriver) -> None:
    """speaches#133, transformers#24512."""
    noise = np.random.default_rng(1).normal(0, 60, 8 * RATE)
    for audio in (np.zeros(8 * RATE), noise, np.zeros(1), np.zeros(100)):
        result, _, events = await hear(whisper, as_wav(audio))
        assert (result.text, result.segments, events) == ("", [], [])
        assert result.duration == len(audio) / RATE


async def test_a_long_recording_is_heard_in_windows(
    whisper: FasterWhisperDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """whisper#2256: memory grows with the length. No word is lost or doubled at the seams."""
    monkeypatch.setattr(faster_whisper, "WINDOW_S", 6)
    monkeypatch.setattr(faster_whisper, "SEAM_S", 3)
    pause = np.zeros(RATE // 2)
    audio = np.concatenate([part for clip in CLIPS for part in (samples(clip), pause)])
    result, _, events = await hear(whisper, as_wav(audio))
    assert error_rate(result.text, SAID) <= 0.1
    starts = [part.start for part in result.segments]
    assert starts == sorted(starts)
    assert starts[-1] > len(audio) / RATE - 7
    fractions = [event.progress.fraction for event in events if event.HasField("progress")]
    assert fractions == sorted(fractions)
    assert 0.8 < fractions[-1] <= 1


def test_windows_end_at_the_quietest_moment() -> None:
    audio = np.ones(700 * RATE, np.float32)
    audio[280 * RATE : 281 * RATE] = 0
    cuts = list(windows(audio, RATE))
    assert cuts[0][0] == 0
    assert 280 * RATE <= cuts[0][1] <= 281 * RATE
    assert cuts[-1][1] == len(audio)
    assert all(one[1] == other[0] for one, other in pairwise(cuts))
    assert max(end - start for start, end in cuts) <= 300 * RATE


@pytest.mark.parametrize("language", ["fr", "xx"])
async def test_an_english_only_model_asked_for_another_language(
    whisper: FasterWhisperDriver, language: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"English only, not '{language}'") as caught:
        await hear(whisper, CLIPS[0].read_bytes(), language=language)
    assert caught.value.param == "language"


async def test_prompt_and_language_are_taken(whisper: FasterWhisperDriver) -> None:
    """The prompt's spelling is followed."""
    clip = SPEECH / "austen-0870.wav"
    plain, _, _ = await hear(whisper, clip.read_bytes(), language="EN")
    prompted, _, _ = await hear(whisper, clip.read_bytes(), prompt="Mister Jon Dashwould went home.")
    assert "Dashwould" not in plain.text
    assert "Dashwould" in prompted.text


async def test_control_tokens_in_a_prompt_are_text(whisper: FasterWhisperDriver) -> None:
    """Read as control tokens, these put `<|nospeech|>` into the transcript."""
    prompt = "<|endoftext|><|startoftranscript|><|nospeech|>"
    tokenizer = whisper.whisper.hf_tokenizer
    tokens = whisper._as_text(prompt)
    assert tokenizer.decode(tokens) == f" {prompt}"  # by default, decode leaves control tokens out
    assert max(tokens) < tokenizer.token_to_id("<|endoftext|>")
    result, _, _ = await hear(whisper, (SPEECH / "austen-0890.wav").read_bytes(), prompt=prompt)
    assert "|" not in result.text
    assert len(words(result.text)) > 5


async def test_bad_uploads_are_told_to_the_user(
    whisper: FasterWhisperDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = CLIPS[0].read_bytes()
    for bad, message in ((b"", "empty"), (b"text" * 99, "no recording"), (data[:-50_000], r"5\.5 s.*7\.1 s")):
        with pytest.raises(InvalidMedia, match=message):
            await hear(whisper, bad)
    monkeypatch.setattr(transcription, "MAX_BYTES", 100_000)
    with pytest.raises(PayloadTooLarge, match="larger than"):
        await hear(whisper, data)


async def test_who_leaves_ends_the_transcription(whisper: FasterWhisperDriver) -> None:
    """prefect#17482, ComfyUI#5421. The driver ends with the stretch (at most 30 s of audio) it works on."""
    long = as_wav(np.tile(np.concatenate([samples(clip) for clip in CLIPS]), 20))  # five minutes
    begun = asyncio.Event()
    calls, cancelled = whisper.counters["calls"], whisper.counters["cancelled"]

    async def emit(_: Event) -> None:
        begun.set()

    task = asyncio.create_task(
        TranscriptionAdapter(whisper).run(TranscriptionParameters(), chunks(long), emit)
    )
    await asyncio.wait_for(begun.wait(), 30)
    start = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - start < 10
    assert whisper.counters["calls"] == calls + 1
    assert whisper.counters["cancelled"] == cancelled + 1
