"""Samples into a sound file, piece by piece as they are made, by PyAV.

Nothing is written twice, so that what is there can be sent at once: a WAV header leaves the length open,
as do MP3, AAC and FLAC. An MP3 or AAC has up to 0.1 s of silence more than was put in, which these formats
cannot tell apart; all others are as long as their samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tasks.protocol.shapes import SoundFormat

RATE = 24_000  # Hz of all that is made; raw PCM cannot say another


@dataclass(frozen=True, slots=True)
class _Kind:
    """FFmpeg's names, and bits per second where sound is lost."""

    content_type: str
    container: str
    codec: str
    bit_rate: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    coder: dict[str, str] = field(default_factory=dict)


_KINDS: dict[SoundFormat, _Kind] = {
    "mp3": _Kind("audio/mpeg", "mp3", "libmp3lame", 96_000, {"write_xing": "0", "id3v2_version": "0"}),
    "opus": _Kind("audio/ogg", "ogg", "libopus", 48_000, {"page_duration": "100000"}),
    "aac": _Kind("audio/aac", "adts", "aac", 96_000, coder={"aac_coder": "fast"}),
    "flac": _Kind("audio/flac", "flac", "flac"),
    "wav": _Kind("audio/wav", "wav", "pcm_s16le"),
    "pcm": _Kind("audio/pcm", "s16le", "pcm_s16le"),
}


class SoundEncoder:
    """One sound. Mono; `rate` of the samples in Hz."""

    def __init__(self, kind: SoundFormat, rate: int) -> None:
        import av

        self.content_type = _KINDS[kind].content_type
        self._rate = rate
        self._written = _Written()
        options = {"flush_packets": "1", "fflags": "+bitexact"}
        self._container = av.open(
            self._written, "w", _KINDS[kind].container, container_options=options | _KINDS[kind].options
        )
        lossy: dict[str, Any] = {"bit_rate": _KINDS[kind].bit_rate} if _KINDS[kind].bit_rate else {}
        self._stream: Any = self._container.add_stream(
            _KINDS[kind].codec, RATE, _KINDS[kind].coder, layout="mono", **lossy
        )
        self._samples = 0

    def encode(self, samples: Any) -> bytes:
        """What is ready once `samples`, float32 in -1..1, are in. It may be nothing yet."""
        import av
        import numpy

        whole = numpy.rint(numpy.clip(samples, -1, 1) * 32767).astype(numpy.int16)
        frame = av.AudioFrame.from_ndarray(whole.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(whole)
        self._container.mux(self._stream.encode(frame))
        return self._written.take()

    def finish(self) -> bytes:
        """The rest."""
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._written.take()


class _Written:
    """A file that can only be written to, as FFmpeg then knows."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
