"""deployments/node/adapters/encode.py, read back by FFmpeg and by Python's own wave module."""

from __future__ import annotations

import io
import wave
from typing import Any, get_args

import av
import numpy as np
import pytest

from deployments.node.adapters.encode import RATE, SoundEncoder
from tasks.protocol.shapes import SoundFormat

SECONDS = 3.1
EXTRA_S = {"mp3": 0.1, "aac": 0.1}  # silence that these formats add and cannot name
CONTAINERS = {"mp3": "mp3", "opus": "ogg", "aac": "aac", "flac": "flac", "wav": "wav"}


def tone(rate: int) -> Any:
    at = np.arange(int(SECONDS * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * 440 * at)).astype(np.float32)


def encoded(kind: SoundFormat, rate: int = RATE, piece: int = 10_007) -> list[bytes]:
    encoder, sound = SoundEncoder(kind, rate), tone(rate)
    parts = [encoder.encode(sound[start : start + piece]) for start in range(0, len(sound), piece)]
    return [*parts, encoder.finish()]


def decoded(kind: str, data: bytes) -> tuple[Any, int]:
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32768, RATE
    with av.open(io.BytesIO(data)) as file:
        assert file.format.name == CONTAINERS[kind]
        resampler = av.AudioResampler("flt", "mono")
        frames = [frame for piece in file.decode(audio=0) for frame in resampler.resample(piece)]
        return np.concatenate([frame.to_ndarray()[0] for frame in frames]), frames[0].sample_rate


@pytest.mark.parametrize("rate", [RATE, 22_050, 16_000])
@pytest.mark.parametrize("kind", get_args(SoundFormat))
def test_as_long_and_as_high_as_what_was_put_in(kind: SoundFormat, rate: int) -> None:
    sound, sounds_at = decoded(kind, b"".join(encoded(kind, rate)))
    assert sounds_at in (RATE, 48_000)  # Opus is always decoded to 48 kHz
    seconds = len(sound) / sounds_at
    assert SECONDS - 0.001 <= seconds <= SECONDS + EXTRA_S.get(kind, 0.001)
    middle = sound[sounds_at : 2 * sounds_at]
    assert abs(np.abs(np.fft.rfft(middle)).argmax() - 440) <= 1
    assert np.abs(middle).max() == pytest.approx(0.4, abs=0.05)


@pytest.mark.parametrize("kind", get_args(SoundFormat))
def test_each_piece_is_there_as_soon_as_it_is_in(kind: SoundFormat) -> None:
    """At most 0.2 s of sound are held back."""
    parts = encoded(kind, piece=RATE)
    sound, sounds_at = decoded(kind, b"".join(parts[:2]))
    assert len(sound) / sounds_at >= 2 - 0.2


def test_a_wav_says_that_its_length_is_open_and_any_reader_reads_it() -> None:
    data = b"".join(encoded("wav"))
    assert (data[4:8], data[36:44]) == (b"\xff" * 4, b"data" + b"\xff" * 4)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert len(file.readframes(10**7)) == 2 * int(SECONDS * RATE)


def test_what_is_too_loud_is_clipped_and_does_not_wrap() -> None:
    encoder = SoundEncoder("pcm", RATE)
    data = encoder.encode(np.array([2, 1, -1, -3, 0.5], np.float32)) + encoder.finish()
    assert list(np.frombuffer(data, "<i2")) == [32767, 32767, -32767, -32767, 16384]
