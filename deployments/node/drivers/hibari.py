"""Text to speech with hibari's English voices. Weights and dictionaries come in its package.

Voice `heart` is in the package; each other one that `voices` names is fetched by the package, once, into
its own cache (`HIBARI_HOME`).
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from blocks.errors import InvalidRequest, LoadFailed
from deployments.node.drivers.base import Prompt, SpeechDriver, Working
from deployments.node.drivers.options import read_options
from deployments.node.drivers.speakable import speakable
from tasks.protocol.shapes import SpeechParameters

OWN = "heart"
FASTEST = 2.0  # beyond it the model shortens what it says less than it is told
PIECE = 150  # phonemes said at once at speed 1 and above: 9 s of sound, in less than 100 ms
LEAST_PIECE = 60  # and at the slowest, where each phoneme is longer


class HibariOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    threads: int = Field(1, ge=1, description="CPU threads; one makes a minute of sound in half a second")
    voices: dict[str, str] = Field(
        default_factory=dict, description="more names for voices: what a request may say, and the voice meant"
    )


class HibariDriver(SpeechDriver):
    """One text at a time, said by sentences. The same request gives the same sound."""

    preload: ClassVar[tuple[str, ...]] = ("hibari", "hibari.g2p", "onnxruntime", "scipy.fft")

    def load(self) -> None:
        self.options = read_options(self.model, HibariOptions)
        try:
            import hibari
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'hibari' needs the package {error.name}; "
                "run `pip install 'smi[embedded]'`"
            ) from error
        self.sample_rate = hibari.SAMPLE_RATE
        names = dict.fromkeys((OWN, *self.options.voices.values()))
        self.voices = tuple(dict.fromkeys((*names, *self.options.voices)))
        self._speakers = self._loaded(names)

    def _loaded(self, names: Any) -> dict[str, Any]:
        from hibari import Hibari
        from hibari.voices import VOICES

        speakers: dict[str, Any] = {}
        readers: dict[bool, Any] = {}  # dictionaries take more memory than voices, and are shared
        for name in names:
            if name not in VOICES:
                raise LoadFailed(
                    f"model {self.model.name!r}: option 'voices' means voice {name!r}, which hibari does "
                    f"not have; it has: {', '.join(VOICES)}"
                )
            british = VOICES[name]["british"]
            try:
                speaker = Hibari(name, threads=self.options.threads, g2p=readers.get(british))
            except RuntimeError as error:  # its download failed, or the file is broken
                raise LoadFailed(
                    f"model {self.model.name!r}: voice {name!r} cannot be loaded: {error}"
                ) from error
            readers[british] = speaker.g2p
            speaker("Ready.")  # allocates what the first request would wait for
            speakers[name] = speaker
        return speakers

    def run(
        self, parameters: SpeechParameters, cancelled: threading.Event
    ) -> Iterator[Prompt | Working | Any]:
        import numpy

        self.counters["calls"] += 1
        speed = parameters.speed
        if speed > FASTEST:
            raise InvalidRequest(
                f"model {self.model.name!r} speaks at a speed of up to {FASTEST:g}, not {speed:g}",
                param="speed",
            )
        speaker = self._speakers[self.options.voices.get(parameters.voice, parameters.voice)]
        longest = max(LEAST_PIECE, int(PIECE * min(1.0, speed)))
        with self.counting(cancelled):
            pieces = list(self._pieces(speaker, parameters.input, longest, cancelled))
            whole = sum(map(len, pieces))
            if not whole and not cancelled.is_set():
                raise InvalidRequest("the text has nothing that could be said in English", param="input")
            yield Prompt(whole)
            said, noise = 0, numpy.random.default_rng(0)
            for piece in pieces:
                if cancelled.is_set():
                    return
                yield speaker.from_ids(speaker.ids(piece), speed, noise)
                said += len(piece)
                self.counters["tokens"] += len(piece)
                yield Working(said / whole)

    def _pieces(self, speaker: Any, text: str, longest: int, cancelled: threading.Event) -> Iterator[str]:
        """Phonemes of at most `longest` at once, where possible a sentence."""
        from hibari.g2p.normalize import CURRENCY_WORDS, SYMBOLS

        letters = {mark for mark in speaker.g2p.oov.cin if unicodedata.name(mark, "").startswith("LATIN")}
        text = speakable(text, letters, SYMBOLS.keys() | CURRENCY_WORDS.keys())
        for sentence in speaker.split_sentences(text):
            if cancelled.is_set():
                return
            yield from filter(_sounds, cut(speaker.g2p(sentence), longest))


def _sounds(phonemes: str) -> bool:
    return any(mark.isalpha() for mark in phonemes)


_CLAUSE = re.compile(r"[,;:—…](?=\s)")


def cut(phonemes: str, longest: int) -> Iterator[str]:
    """`phonemes` in pieces of at most `longest`, cut after a clause if there is one, else between words."""
    while len(phonemes) > longest:
        clauses = [match.end() for match in _CLAUSE.finditer(phonemes, 0, longest)]
        end = clauses[-1] if clauses else phonemes.rfind(" ", 1, longest + 1)
        if end < 1:
            end = longest
        yield phonemes[:end]
        phonemes = phonemes[end:].lstrip()
    yield phonemes
