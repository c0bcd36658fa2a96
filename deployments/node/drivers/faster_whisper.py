"""Speech to text with Whisper models in CTranslate2's format.

What its voice activity detection does not hear as speech is never transcribed: on silence Whisper makes
up text. Long recordings are worked on in windows, so that memory does not grow with their length.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from blocks.catalogue import Model
from blocks.errors import InvalidRequest, LoadFailed
from blocks.validation import quoted
from deployments.node.drivers.base import Speech, TranscriptionDriver
from deployments.node.drivers.options import default_threads, read_options
from deployments.node.drivers.weights import resolve
from tasks.protocol.shapes import Segment, TranscriptionParameters

WINDOW_S = 300  # worked on at once
SEAM_S = 30  # a window ends at the quietest moment of its last seconds
FRAME_S = 0.1
FALLBACKS = (0.2, 0.4, 0.6, 0.8, 1.0)  # higher temperatures, for a window that came out as repetition
HUB_FILES = ("config.json", "preprocessor_config.json", "model.bin", "tokenizer.json", "vocabulary.*")


class FasterWhisperOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field("auto", description="cpu, cuda; auto: cuda where there is one")
    compute_type: str = Field(
        "default", description="CTranslate2's; default: int8 on a CPU, float16 on a GPU"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: half of the cores")
    beam_size: int = Field(5, ge=1)


class FasterWhisperDriver(TranscriptionDriver):
    """One Whisper model, one recording at a time."""

    preload: ClassVar[tuple[str, ...]] = ("ctranslate2", "faster_whisper", "av")

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._here = threading.local()  # the event of the transcript that this thread makes

    def load(self) -> None:
        self.options = read_options(self.model, FasterWhisperOptions)
        try:
            import ctranslate2
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'faster-whisper' needs the package {error.name}; "
                "run `pip install 'smi[audio]'`"
            ) from error
        device = self.options.device
        if device == "auto":
            device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
        compute = self.options.compute_type
        if compute == "default":
            compute = "int8" if device == "cpu" else "float16"
        folder = resolve(self.model, HUB_FILES)
        if not (folder / "tokenizer.json").is_file():  # else it would be looked for on the hub
            raise LoadFailed(
                f"model {self.model.name!r}: {folder} holds no Whisper model (no tokenizer.json)"
            )
        threads = self.options.threads or default_threads()
        try:
            self.whisper = WhisperModel(
                str(folder), device=device, compute_type=compute, cpu_threads=threads, local_files_only=True
            )
        except (RuntimeError, ValueError) as error:  # what CTranslate2 raises, broken files included
            raise LoadFailed(f"model {self.model.name!r} cannot be loaded: {error}") from error
        self.whisper.model = _Watched(self.whisper.model, self._stop_here)

    def _stop_here(self) -> None:
        if self._here.cancelled.is_set():
            raise _Stopped

    def run(
        self, audio: Any, parameters: TranscriptionParameters, cancelled: threading.Event
    ) -> Iterator[Speech | Segment]:
        self.counters["calls"] += 1
        language = self._language(parameters)
        self._here.cancelled = cancelled
        with self.counting(cancelled), suppress(_Stopped):
            yield from self._all(audio, language, parameters)

    def _all(
        self, audio: Any, language: str | None, parameters: TranscriptionParameters
    ) -> Iterator[Speech | Segment]:
        told = False
        for start, end in windows(audio, self.sample_rate):
            self._stop_here()
            segments, info = self._hear(audio[start:end], language, parameters)
            silent = info.duration_after_vad == 0
            if not told and (not silent or end == len(audio)):
                told, language = True, info.language
                yield Speech(info.language, len(audio) / self.sample_rate)
            if silent:
                continue
            offset = start / self.sample_rate
            for segment in segments:
                self._stop_here()
                self.counters["segments"] += 1
                yield Segment(start=offset + segment.start, end=offset + segment.end, text=segment.text)

    def _hear(self, audio: Any, language: str | None, parameters: TranscriptionParameters) -> tuple[Any, Any]:
        """Whisper's segments, made as they are read, and what it found out before."""
        temperature = parameters.temperature
        return self.whisper.transcribe(  # type: ignore[no-any-return]
            audio,
            language=language,
            initial_prompt=self._as_text(parameters.prompt) if parameters.prompt else None,
            temperature=[temperature, *(hotter for hotter in FALLBACKS if hotter > temperature)],
            beam_size=self.options.beam_size,
            vad_filter=True,
        )

    def _as_text(self, prompt: str) -> list[int]:
        """The prompt's tokens. Cut within every "<|", so that none of it is read as a control token."""
        pieces = re.split(r"(?<=<)(?=\|)", f" {prompt.strip()}")
        encode = self.whisper.hf_tokenizer.encode
        return [token for piece in pieces for token in encode(piece, add_special_tokens=False).ids]

    def _language(self, parameters: TranscriptionParameters) -> str | None:
        known = self.whisper.supported_languages
        language = parameters.language.lower() if parameters.language else None
        if language is None or language in known:
            return language
        if known == ["en"]:
            raise InvalidRequest(
                f"model {self.model.name!r} knows English only, not {quoted(language)}; "
                "leave `language` out or use a multilingual model",
                param="language",
            )
        raise InvalidRequest(
            f"language {quoted(language)} is not known; give an ISO 639-1 code: {', '.join(sorted(known))}",
            param="language",
        )


class _Stopped(Exception):
    """The transcript is not wanted any more."""


class _Watched:
    """A CTranslate2 model that looks, before each of its longer calls, whether to go on."""

    def __init__(self, model: Any, look: Callable[[], None]) -> None:
        self._model, self._look = model, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode(self, *args: Any, **options: Any) -> Any:
        self._look()
        return self._model.encode(*args, **options)

    def generate(self, *args: Any, **options: Any) -> Any:
        self._look()
        return self._model.generate(*args, **options)


def windows(audio: Any, rate: int) -> Iterator[tuple[int, int]]:
    """Where to cut a recording, in samples: at the quietest moment before each window's end."""
    import numpy

    start, frame = 0, int(FRAME_S * rate)
    while len(audio) - start > WINDOW_S * rate:
        seam = start + (WINDOW_S - SEAM_S) * rate
        loudness = numpy.square(audio[seam : seam + SEAM_S * rate]).reshape(-1, frame).mean(1)
        end = seam + int(loudness.argmin()) * frame + frame // 2
        yield start, end
        start = end
    yield start, len(audio)
