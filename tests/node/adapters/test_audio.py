"""deployments/node/adapters/audio.py on real recordings in many containers."""

from __future__ import annotations

import io
import threading
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import av
import numpy as np
import pytest

from blocks.errors import InvalidMedia, PayloadTooLarge
from deployments.node.adapters import audio
from deployments.node.adapters.audio import decode

CLIP = Path(__file__).parents[2] / "data" / "speech" / "austen-0880.wav"
RATE = 16_000


def decoded(data: bytes, rate: int = RATE) -> Any:
    samples = io.BytesIO()
    list(decode(io.BytesIO(data), samples, rate, threading.Event()))
    return np.frombuffer(samples.getvalue(), np.float32)


@pytest.fixture(scope="module")
def clip() -> Any:
    """The clip's samples, read without our code."""
    with wave.open(str(CLIP)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def encoded(
    clip: Any, container: str, codec: str, *, rate: int = RATE, layout: str = "mono", **options: str
) -> bytes:
    """The clip written by FFmpeg's encoders, with every channel the same."""
    with NamedTemporaryFile() as out:
        with av.open(out.name, "w", format=container, options=options) as file:
            stream = file.add_stream(codec, rate=rate)
            stream.layout = layout
            resampler = av.AudioResampler(stream.format.name, layout, rate)
            for piece in (*resampler.resample(frame(clip, layout)), *resampler.resample(None)):
                file.mux(stream.encode(piece))
            file.mux(stream.encode(None))
        return Path(out.name).read_bytes()


def frame(clip: Any, layout: str) -> Any:
    count = av.AudioLayout(layout).nb_channels
    wide = av.AudioFrame.from_ndarray(clip[None, :].repeat(count, 0), "fltp", layout)
    wide.sample_rate = RATE
    return wide


def likeness(one: Any, other: Any) -> float:
    """Correlation at the best shift within 0.1 s (codecs delay)."""
    size = min(len(one), len(other)) - 3200
    middle = one[1600 : 1600 + size]
    shifts = np.correlate(other[: size + 3200], middle, "valid")
    at = int(shifts.argmax())
    return float(np.corrcoef(middle, other[at : at + size])[0, 1])


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [("pcm_u8", 0.01), ("pcm_s16le", 1e-4), ("pcm_s24le", 1e-4), ("pcm_s32le", 1e-4), ("pcm_f32le", 1e-6),
     ("pcm_f64le", 1e-6), ("pcm_s16be", 1e-4)],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1"])
def test_every_sample_format_is_scaled_right(clip: Any, codec: str, layout: str, tolerance: float) -> None:
    """OpenWhispr#1375, pocket-tts#236: float32 as zeros, 24-bit as noise, 8-bit, stereo."""
    container = "aiff" if codec.endswith("be") else "wav"
    heard = decoded(encoded(clip, container, codec, layout=layout))
    assert heard.shape == clip.shape
    assert np.abs(heard - clip).max() < tolerance


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("mp3", "libmp3lame", 44_100), ("flac", "flac", 48_000), ("ogg", "libopus", 48_000),
     ("webm", "libopus", 48_000), ("ipod", "aac", 44_100), ("mp4", "aac", 22_050), ("adts", "aac", RATE),
     ("matroska", "pcm_s16le", 8_000), ("wav", "pcm_s16le", 44_100)],
)  # fmt: skip
def test_m4a_webm_opus_and_others_are_read(clip: Any, container: str, codec: str, rate: int) -> None:
    """VoiceStudio#2039, open-webui#5590. The decoder never sees a name, so none can mislead it."""
    heard = decoded(encoded(clip, container, codec, rate=rate, layout="stereo"))
    assert abs(len(heard) - len(clip)) < 0.15 * RATE
    assert likeness(clip, heard) > 0.95
    assert 0.8 < np.square(heard).sum() / np.square(clip).sum() < 1.2


def test_nan_and_overdriven_floats_stay_within_bounds(clip: Any) -> None:
    wild = np.concatenate([clip * 100, np.full(160, np.nan, np.float32), np.full(160, np.inf, np.float32)])
    heard = decoded(encoded(wild, "wav", "pcm_f32le"))
    assert np.isfinite(heard).all()
    assert np.abs(heard).max() == 1


def pdf(_: bytes) -> bytes:
    return b"%PDF-1.7\n" + b"1 0 obj <<>> endobj\n" * 200


def picture(_: bytes) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="image2pipe") as file:
        stream = file.add_stream("png", rate=1)
        stream.width = stream.height = 32
        stream.pix_fmt = "rgb24"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
    return out.getvalue()


def silent_film(_: bytes) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for _frame in range(5):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: b"Dear Sir or Madam, this is a letter.\n" * 50, "no recording"),
        (lambda data: data[:20], "no recording"),
        (lambda data: data[:44], "promises"),
        (lambda data: data[:44].replace(data[40:44], bytes(4)), "before the first sample"),
        (lambda _: bytes(100_000), "no recording"),
        (lambda _: b"ffconcat version 1.0\nfile clip.wav\n", "no recording"),
        (lambda _: b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n", "no recording"),
        (pdf, "no recording"),
        (picture, "no recording"),
        (silent_film, "no sound"),
    ],
    ids=["text", "half-header", "header", "no-samples", "zeros", "concat", "playlist", "pdf",
         "picture", "silent-film"],
)  # fmt: skip
def test_what_is_no_recording_is_refused_with_a_message_that_helps(
    spoil: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(InvalidMedia, match=message) as caught:
        decoded(spoil(CLIP.read_bytes()))
    assert caught.value.param == "file"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("wav", "pcm_s16le", {}),
        ("flac", "flac", {}),
        ("mp4", "aac", {}),
        ("mp4", "aac", {"movflags": "faststart"}),  # the index comes first, as web servers want it
        ("webm", "libopus", {}),
        ("ogg", "libopus", {}),
        ("flv", "aac", {}),
        ("mp3", "libmp3lame", {}),
        ("avi", "libmp3lame", {}),
        ("avi", "pcm_s16le", {}),
        ("aiff", "pcm_s16be", {}),
        ("au", "pcm_s16be", {}),
        ("wv", "wavpack", {}),
        ("tta", "tta", {}),
    ],
)
def test_a_recording_that_breaks_off_is_not_taken_for_the_whole(
    clip: Any, container: str, codec: str, options: dict[str, str]
) -> None:
    whole = encoded(clip, container, codec, **options)
    assert len(decoded(whole)) == pytest.approx(len(clip), abs=2400)
    with pytest.raises(InvalidMedia, match="breaks off"):
        decoded(whole[: len(whole) // 2])


def film(clip: Any, container: str, codec: str, seconds: float, *, late: float = 0) -> bytes:
    """The clip, beginning `late` seconds late, beside pictures."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        video = file.add_stream("mpeg4", rate=5)
        video.width = video.height = 32
        sound = file.add_stream(codec, rate=48_000)
        sound.layout = "mono"
        picture = np.zeros((32, 32, 3), np.uint8)
        shown = [av.VideoFrame.from_ndarray(picture, "rgb24") for _ in range(int(seconds * 5))]
        packets = [packet for part in (*shown, None) for packet in video.encode(part)]
        resampler = av.AudioResampler(sound.format.name, "mono", 48_000)
        for at in range(0, len(clip), RATE // 10):
            part = frame(clip[at : at + RATE // 10], "mono")
            part.pts, part.time_base = at + int(late * RATE), Fraction(1, RATE)
            packets += [packet for piece in resampler.resample(part) for packet in sound.encode(piece)]
        packets += [packet for piece in resampler.resample(None) for packet in sound.encode(piece)]
        packets += sound.encode(None)
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            file.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(
    ("container", "codec"), [("matroska", "libopus"), ("avi", "pcm_s16le"), ("avi", "libmp3lame")]
)
def test_a_film_that_breaks_off_is_refused_and_one_longer_than_its_sound_is_not(
    clip: Any, container: str, codec: str
) -> None:
    for seconds in (1, 3, 15):
        whole = film(clip, container, codec, seconds)
        assert len(decoded(whole)) == pytest.approx(len(clip), abs=2400)
        with pytest.raises(InvalidMedia, match=r"\d s of sound .* promises \d"):
            decoded(whole[: len(whole) // 2])


def test_sound_that_begins_late_is_whole(clip: Any) -> None:
    assert len(decoded(film(clip, "matroska", "libopus", 15, late=8))) == pytest.approx(len(clip), abs=2400)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_an_mp3_says_its_length_in_a_xing_or_vbri_header(clip: Any, rate: int, layout: str) -> None:
    xing = encoded(clip, "mp3", "libmp3lame", rate=rate, layout=layout)
    at = xing.index(b"Info")
    sync = xing.rindex(b"\xff", 0, at)
    vbri = bytearray(xing)
    vbri[at : at + 4] = bytes(4)
    vbri[sync + 36 : sync + 54] = b"VBRI" + bytes(10) + xing[at + 8 : at + 12]
    for whole in (xing, bytes(vbri), xing[sync:]):
        assert len(decoded(whole)) == pytest.approx(len(clip), abs=0.3 * RATE)
        with pytest.raises(InvalidMedia, match=r"promises 3\."):
            decoded(whole[: len(whole) // 2])


@pytest.mark.parametrize("container", ["mp3", "adts", "ogg"])
def test_what_promises_no_length_is_read_as_far_as_it_goes(clip: Any, container: str) -> None:
    """A bit rate that varies makes FFmpeg's estimates wrong, which must not refuse a whole file."""
    uneven = np.concatenate([np.tile(clip, 2), np.zeros(20 * RATE, np.float32)])
    codec, options = {
        "mp3": ("libmp3lame", {"write_xing": "0"}),
        "adts": ("aac", {}),
        "ogg": ("libopus", {}),
    }[container]
    data = encoded(uneven, container, codec, rate=48_000 if container == "ogg" else RATE, **options)
    last = data.rfind(b"OggS")  # Ogg: live, the last page's end-of-stream flag never came
    cut = data[:last] if container == "ogg" else data[: len(data) // 2]
    assert len(decoded(data)) == pytest.approx(len(uneven), abs=0.3 * RATE)
    assert 2 * RATE < len(decoded(cut)) < len(uneven)


@pytest.mark.parametrize("rate", [10, 3_999])
def test_a_sample_rate_too_low_for_speech_is_refused(rate: int) -> None:
    """36 kB at 10 Hz would count as an hour."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(rate)
        file.writeframes(bytes(36_000))
    with pytest.raises(InvalidMedia, match=f"is {rate} Hz; give 4000 Hz or more"):
        decoded(out.getvalue())


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF, 0])
def test_a_wav_from_a_pipe_has_no_size_and_is_read_to_its_end(clip: Any, size: int) -> None:
    data = bytearray(CLIP.read_bytes())
    data[4:8] = data[40:44] = size.to_bytes(4, "little")
    assert decoded(bytes(data)).shape == clip.shape


def test_a_damaged_packet_is_passed_over(clip: Any) -> None:
    data = bytearray(encoded(clip, "mp3", "libmp3lame"))
    data[len(data) // 2 : len(data) // 2 + 60] = b"\xff" * 60
    assert len(decoded(bytes(data))) > 0.8 * len(clip)


def test_decoding_stops_when_it_is_cancelled(clip: Any) -> None:
    cancelled, samples = threading.Event(), io.BytesIO()
    data = encoded(np.tile(clip, 60), "flac", "flac")
    steps = decode(io.BytesIO(data), samples, RATE, cancelled)
    assert next(steps) == pytest.approx(60, abs=1)
    cancelled.set()
    assert list(steps) == []
    assert len(samples.getvalue()) // 4 < 62 * RATE


@pytest.mark.parametrize("piece", [b"ID3\4\0\0\0\0\0\0", b"LIST\0\0\0\0"])
def test_a_file_of_empty_chunks_is_soon_refused(piece: bytes) -> None:
    upload = Counting(b"RIFF\xff\xff\xff\0WAVE" * (piece[:1] == b"L") + piece * 100_000)
    with pytest.raises(InvalidMedia):
        list(decode(upload, io.BytesIO(), RATE, threading.Event()))
    assert upload.reads < 10_000


class Counting(io.BytesIO):
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def test_a_small_file_that_unpacks_to_days_is_refused(clip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_SECONDS", 2)
    with pytest.raises(PayloadTooLarge, match="longer than"):
        decoded(CLIP.read_bytes())
