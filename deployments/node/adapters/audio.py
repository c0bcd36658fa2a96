"""Recordings in any container into samples: float32, mono, at the driver's rate.

What the bytes are is found out from the bytes, never from a name. A recording that breaks off before
what its own header promises is refused, so that nobody takes part of a transcript for the whole. Some
files promise nothing, and pass when they are cut: raw AAC (ADTS), AMR, MP3 without a Xing or VBRI header,
Ogg cut between two pages, and whatever was written live, with no length in its header.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from blocks.errors import InvalidMedia, PayloadTooLarge

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MAX_SECONDS = 24 * 3600
MIN_RATE = 4000  # Hz; below it there is no speech, and few bytes stand for hours
REPORT_S = 60
SHORT = 0.02  # of what was promised may be missing: durations in headers are rounded
SHORT_S = 0.5
UNKNOWN_SIZE = 0x7FFF_0000  # writers that cannot seek put sizes from here on into a WAV header
MAX_CHUNKS = 1000  # looked at before the sound: a file may be nothing but empty ones
OGG_PAGE = 27 + 255 + 255 * 255  # bytes at most

# Formats that hold sound themselves. Playlists are not among them: they name other files and addresses.
FORMATS = (
    "aac,ac3,aiff,amr,asf,au,avi,caf,dsf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,mp3,mpeg,mpegts,"
    "ogg,oga,rm,tta,voc,w64,wav,wv,ape"
)
ONLY = {"format_whitelist": FORMATS}
# Of some, the header says exactly how long the sound is; of some, when the last of all streams ends.
EXACT = {"wav", "flac", "mov,mp4,m4a,3gp,3g2,mj2", "aiff", "au", "wv", "tta"}
CLOCKED = {"matroska,webm", "flv"}
# In the first frame of an MP3: where the side information ends, or 32 bytes on.
MP3_LENGTH = re.compile(
    rb"\xff[\xe0-\xff](?:.{11,34}?(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f](?P<xing>.{4})"
    rb"|.{34}VBRI.{10}(?P<vbri>.{4}))",
    re.DOTALL,
)
KNOWN = "give wav, mp3, m4a, flac, ogg, opus or webm"


def decode(upload: IO[bytes], samples: IO[bytes], rate: int, cancelled: threading.Event) -> Iterator[float]:
    """Write the sound of `upload` to `samples` as float32; yield the seconds written every so often.

    Raises:
        InvalidMedia: for bytes that are no recording, have no sound, or break off.
        PayloadTooLarge: for more than `MAX_SECONDS`.
    """
    import av

    _refuse_cut_wav(upload)
    _refuse_cut_ogg(upload)
    mp3_frames = _mp3_frames(upload)
    upload.seek(0)
    written = reported = 0
    try:
        with av.open(upload, "r", metadata_errors="ignore", options=ONLY) as container:
            if not container.streams.audio:
                raise InvalidMedia(f"the file has no sound in it; {KNOWN}", param="file")
            frames = _Frames(container)
            for block in _resampled(frames, rate):
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
            there, promised = _lengths(frames, written / rate, mp3_frames)
    except av.error.FFmpegError:
        raise InvalidMedia(
            f"the file is no recording, or breaks off in its header; {KNOWN}", param="file"
        ) from None
    if not written:
        raise InvalidMedia("the file has no sound in it: it breaks off before the first sample", param="file")
    if there < promised - max(SHORT_S, SHORT * promised):
        raise _cut(there, promised)
    yield written / rate


class _Frames:
    """Frames of the first audio stream; damaged packets are passed over, as every player does."""

    def __init__(self, container: Any) -> None:
        self.container, self.stream = container, container.streams.audio[0]
        self._ends: dict[int, int] = {}

    def __iter__(self) -> Iterator[Any]:
        import av

        packets = self.container.demux()
        while True:
            try:
                packet = next(packets)
                if packet.pts is not None:
                    at = packet.stream_index
                    self._ends[at] = max(self._ends.get(at, 0), packet.pts + (packet.duration or 0))
                if packet.stream_index == self.stream.index:
                    yield from packet.decode()
            except av.error.InvalidDataError:
                continue
            except (StopIteration, av.error.EOFError):
                return

    @property
    def end(self) -> float:
        """Seconds on the file's own clock at which the last packet of any stream ends."""
        streams = self.container.streams
        ends = (float(end * streams[at].time_base) for at, end in self._ends.items())
        return max(ends, default=0.0)


def _resampled(frames: Iterable[Any], rate: int) -> Iterator[NDArray[numpy.float32]]:
    """Blocks of mono samples in -1..1. Channels are averaged, so that two equal ones are as loud as one."""
    import av

    resampler: Any = None
    shape = None
    for frame in frames:
        frame.pts = None  # gaps and jumps in time stamps are not filled
        if (now := (frame.format.name, frame.layout.name, frame.sample_rate)) != shape:
            if frame.sample_rate < MIN_RATE:
                raise InvalidMedia(
                    f"the sample rate is {frame.sample_rate} Hz; give {MIN_RATE} Hz or more, best 16000 Hz",
                    param="file",
                )
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


def _lengths(frames: _Frames, heard: float, mp3_frames: int) -> tuple[float, float]:
    """Seconds that are there, and that the header says there are: 0 where it does not say so exactly."""
    container, stream, name = frames.container, frames.stream, frames.container.format.name
    promised = 0.0
    if name in CLOCKED and container.duration:
        return frames.end, container.duration / 1_000_000
    if name in EXACT and stream.duration:
        promised = float(stream.duration * stream.time_base)
    elif name == "avi":
        promised = float(stream.frames * stream.time_base)
    elif name == "mp3":
        promised = mp3_frames * stream.codec_context.frame_size / stream.codec_context.sample_rate
    return heard, promised


def _mp3_frames(upload: IO[bytes]) -> int:
    """Frames that the Xing or VBRI header says an MP3 has; 0 without one. Else FFmpeg only estimates."""
    upload.seek(0)
    for _ in range(MAX_CHUNKS):
        head = upload.read(10)
        if len(head) < 10 or not head.startswith(b"ID3"):
            break
        upload.seek(head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9], 1)
    found = MP3_LENGTH.match(head + upload.read(64))
    return int.from_bytes(found["xing"] or found["vbri"]) if found else 0


def _refuse_cut_ogg(upload: IO[bytes]) -> None:
    """Every page of an Ogg file says how long it is; of the last one, all must be there.

    A missing end-of-stream flag says less: there are writers that never set it.
    """
    upload.seek(0)
    if upload.read(4) != b"OggS":
        return
    upload.seek(max(0, upload.seek(0, 2) - OGG_PAGE))
    tail = upload.read()
    if (at := tail.rfind(b"OggS\0")) < 0:
        return
    page = tail[at:]
    if len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]]):
        raise InvalidMedia("the file breaks off within its last page; send it again whole", param="file")


def _refuse_cut_wav(upload: IO[bytes]) -> None:
    """FFmpeg believes the length of the file more than a WAV's header, so the header is read here."""
    size = upload.seek(0, 2)
    upload.seek(0)
    riff, _, wave = struct.unpack("<4sI4s", upload.read(12).ljust(12, b"\0"))
    if riff != b"RIFF" or wave != b"WAVE":
        return
    bytes_per_second = 0
    for _ in range(MAX_CHUNKS):
        if len(head := upload.read(8)) < 8:
            return
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
