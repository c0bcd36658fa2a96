"""Recordings in any container into samples: float32, mono, at the driver's rate.

What the bytes are is found out from the bytes, never from a name. A recording that breaks off before
what its own header promises is refused, so that nobody takes part of a transcript for the whole.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from blocks.errors import InvalidMedia, PayloadTooLarge

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MAX_SECONDS = 24 * 3600
REPORT_S = 60
SHORT = 0.02  # of what was promised may be missing: durations in headers are rounded
SHORT_S = 0.5
UNKNOWN_SIZE = 0x7FFF_0000  # writers that cannot seek put sizes from here on into a WAV header

# Formats that hold sound themselves. Playlists are not among them: they name other files and addresses.
FORMATS = (
    "aac,ac3,aiff,amr,asf,au,avi,caf,dsf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,mp3,mpeg,mpegts,"
    "ogg,oga,rm,tta,voc,w64,wav,wv,ape"
)
ONLY = {"format_whitelist": FORMATS}
# Of these, the header says exactly how long the sound is.
EXACT = {"wav", "flac", "mov,mp4,m4a,3gp,3g2,mj2"}
KNOWN = "give wav, mp3, m4a, flac, ogg, opus or webm"


def decode(upload: IO[bytes], samples: IO[bytes], rate: int, cancelled: threading.Event) -> Iterator[float]:
    """Write the sound of `upload` to `samples` as float32; yield the seconds written every so often.

    Raises:
        InvalidMedia: for bytes that are no recording, have no sound, or break off.
        PayloadTooLarge: for more than `MAX_SECONDS`.
    """
    import av

    _refuse_cut_wav(upload)
    upload.seek(0)
    written = reported = 0
    try:
        with av.open(upload, "r", metadata_errors="ignore", options=ONLY) as container:
            if not container.streams.audio:
                raise InvalidMedia(f"the file has no sound in it; {KNOWN}", param="file")
            stream = container.streams.audio[0]
            for block in _resampled(_frames(container, stream), rate):
                if cancelled.is_set():
                    return
                samples.write(block.data)
                written += block.size
                if written > MAX_SECONDS * rate:
                    raise PayloadTooLarge(
                        f"the recording is longer than {MAX_SECONDS // 3600} h", param="file"
                    )
                if written - reported >= REPORT_S * rate:
                    reported = written
                    yield written / rate
            promised = _promised(container, stream)
    except av.error.FFmpegError:
        raise InvalidMedia(
            f"the file is no recording, or breaks off in its header; {KNOWN}", param="file"
        ) from None
    if not written:
        raise InvalidMedia("the file has no sound in it: it breaks off before the first sample", param="file")
    if written / rate < promised - max(SHORT_S, SHORT * promised):
        raise _cut(written / rate, promised)
    yield written / rate


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Frames of one stream; damaged packets are passed over, as every player does."""
    import av

    packets = container.demux(stream)
    while True:
        try:
            yield from next(packets).decode()
        except av.error.InvalidDataError:
            continue
        except (StopIteration, av.error.EOFError):
            return


def _resampled(frames: Iterator[Any], rate: int) -> Iterator[NDArray[numpy.float32]]:
    """Blocks of mono samples in -1..1. Channels are averaged, so that two equal ones are as loud as one."""
    import av

    resampler: Any = None
    shape = None
    for frame in frames:
        frame.pts = None  # gaps and jumps in time stamps are not filled
        if (now := (frame.format.name, frame.layout.name, frame.sample_rate)) != shape:
            if resampler is not None:
                yield from map(_mono, resampler.resample(None))
            resampler, shape = av.AudioResampler("fltp", frame.layout, rate), now
        yield from map(_mono, resampler.resample(frame))
    if resampler is not None:
        yield from map(_mono, resampler.resample(None))


def _mono(frame: Any) -> NDArray[numpy.float32]:
    import numpy

    mixed = numpy.nan_to_num(frame.to_ndarray().mean(0, dtype=numpy.float32), posinf=1, neginf=-1)
    return numpy.ascontiguousarray(mixed.clip(-1, 1))


def _promised(container: Any, stream: Any) -> float:
    """Seconds of sound that the header says there are; 0 where it does not say so exactly."""
    if container.format.name in EXACT and stream.duration:
        return float(stream.duration * stream.time_base)
    if container.format.name == "matroska,webm" and len(container.streams) == 1 and container.duration:
        return float(container.duration) / 1_000_000
    return 0.0


def _refuse_cut_wav(upload: IO[bytes]) -> None:
    """FFmpeg believes the length of the file more than a WAV's header, so the header is read here."""
    size = upload.seek(0, 2)
    if size == 0:
        raise InvalidMedia("the file is empty", param="file")
    upload.seek(0)
    riff, _, wave = struct.unpack("<4sI4s", upload.read(12).ljust(12, b"\0"))
    if riff != b"RIFF" or wave != b"WAVE":
        return
    bytes_per_second = 0
    while len(head := upload.read(8)) == 8:
        name, length = struct.unpack("<4sI", head)
        if name == b"data":
            there = size - upload.tell()
            if there < length < UNKNOWN_SIZE and bytes_per_second:
                raise _cut(there / bytes_per_second, length / bytes_per_second)
            return
        body = upload.read(16) if name == b"fmt " else b""
        if len(body) == 16:
            bytes_per_second = struct.unpack("<8xI4x", body)[0]
        upload.seek(length + length % 2 - len(body), 1)


def _cut(there: float, promised: float) -> InvalidMedia:
    return InvalidMedia(
        f"the file breaks off: {there:.1f} s of sound are there, its header promises {promised:.1f} s; "
        "send it again whole",
        param="file",
    )
