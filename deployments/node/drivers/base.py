"""The surface of a driver: `load`, `run`, `unload`. One driver knows one model family.

A third party adds one as an entry point of group `smi.drivers`; the catalogue's `driver` names it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from blocks.catalogue import Model
from tasks.protocol.shapes import ChatParameters, Page, Segment, SpeechParameters, TranscriptionParameters


class Driver(ABC):
    """One loaded model, in a process of its own.

    `run` of the modality's subclass is a generator, or an async generator. A plain generator runs in a
    thread and looks at `cancelled` between items; an async one is closed when the request is cancelled.

    Attributes:
        preload: modules that the node's forkserver imports once for all runners.
        counters: shown in the node's state; `calls`, `tokens`, `cancelled`, `cancelled_at` (Unix time of the
            last) and what the driver adds.
    """

    preload: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: Model) -> None:
        self.model = model
        self.counters: defaultdict[str, float] = defaultdict(float)

    @abstractmethod
    def load(self) -> None:
        """Bring the model into memory, in a thread. Raises `LoadFailed` with what is missing and the cure."""

    def unload(self) -> None:  # noqa: B027 (most drivers need none)
        """Let go of what outlives the process (a connection, a lock); memory goes with the process."""

    @contextmanager
    def counting(self, cancelled: threading.Event) -> Iterator[None]:
        """Around what `run` does: counts one that is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            cancelled.set()  # an async generator hears of it before the event is set
            raise
        finally:
            if cancelled.is_set():
                self.counters["cancelled"] += 1
                self.counters["cancelled_at"] = time.time()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt as the model reads it. Said first, an answer that is cut still knows its usage."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: whole characters, and the tokens they stand for."""

    text: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer: OpenAI's finish reason, and counts in tokens."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ChatDriver(Driver):
    """Continues a conversation."""

    @abstractmethod
    def run(
        self, parameters: ChatParameters, cancelled: threading.Event
    ) -> Iterator[Prompt | Piece | End] | AsyncIterator[Prompt | Piece | End]:
        """Yield a `Prompt` (unless only a remote engine knows), pieces, then one `End`.

        Stop sequences are cut by the adapter, which then ends the driver.
        """


@dataclass(frozen=True, slots=True)
class Speech:
    """What was found out about a recording before its segments; duration in seconds."""

    language: str
    duration: float


class TranscriptionDriver(Driver):
    """Writes down speech."""

    sample_rate: ClassVar[int] = 16_000

    @abstractmethod
    def run(
        self, audio: Any, parameters: TranscriptionParameters, cancelled: threading.Event
    ) -> Iterator[Speech | Segment] | AsyncIterator[Speech | Segment]:
        """Yield one `Speech`, then segments. `audio`: float32 array of shape (samples,), mono, in -1..1."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """`values`: float32 array of shape (inputs, dimensions), each of length 1; `tokens` read in all."""

    values: Any
    tokens: int


class EmbeddingDriver(Driver):
    """Turns texts into vectors. Batches across requests: `slots` of the model run at once."""

    @abstractmethod
    def run(
        self, input: list[str], dimensions: int | None, cancelled: threading.Event
    ) -> Iterator[Vectors] | AsyncIterator[Vectors]:
        """Yield one `Vectors`.

        Raises:
            ContextLengthExceeded: naming the input that is too long (`input[3]`); nothing is cut.
            InvalidRequest: the model has no vectors of that many dimensions.
        """


@dataclass(frozen=True, slots=True)
class Working:
    """How far a driver is, 0 to 1."""

    fraction: float


class SpeechDriver(Driver):
    """Says a text.

    Attributes:
        sample_rate: Hz of what it makes; known after `load`.
        voices: names that a request may give, the default first; known after `load`.
    """

    sample_rate: int
    voices: tuple[str, ...]

    @abstractmethod
    def run(
        self, parameters: SpeechParameters, cancelled: threading.Event
    ) -> Iterator[Prompt | Working | Any] | AsyncIterator[Prompt | Working | Any]:
        """Yield float32 arrays of shape (samples,), mono, in -1..1: the sound piece by piece, as it is made.

        Besides, where it is known, a `Prompt`, and after each piece how far it is. `parameters.voice` is one
        of `voices`.
        """


class CutoutDriver(Driver):
    """Finds the subject of a picture.

    Attributes:
        max_pixels: of a picture, at most; known after `load`.
    """

    max_pixels: int

    @abstractmethod
    def run(
        self, picture: Any, cancelled: threading.Event
    ) -> Iterator[Working | Any] | AsyncIterator[Working | Any]:
        """`picture`: uint8 (height, width, 3). Yield, last, uint8 (height, width): 255 is subject."""


class UpscaleDriver(Driver):
    """Makes pictures larger.

    Attributes:
        scale: how many times; known after `load`.
        max_pixels: of a picture, at most; known after `load`.
    """

    scale: int
    max_pixels: int

    @abstractmethod
    def run(
        self, picture: Any, cancelled: threading.Event
    ) -> Iterator[Working | Any] | AsyncIterator[Working | Any]:
        """`picture`: uint8 (height, width, 3). Yield, last, uint8 (height * scale, width * scale, 3)."""


class ReadingDriver(Driver):
    """Reads documents."""

    @abstractmethod
    def run(
        self, document: IO[bytes], name: str, cancelled: threading.Event
    ) -> Iterator[str | Page | Working] | AsyncIterator[str | Page | Working]:
        """Yield the content type it found, then each page. Raises `InvalidMedia` for what it cannot read.

        `document` is unbuffered, at its start, and has a descriptor, which another process may read.
        """
