"""The surface of a driver: `load`, `run`, `unload`. One driver knows one model family.

A third party adds one as an entry point of group `smi.drivers`; the catalogue's `driver` names it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from blocks.catalogue import Model
from tasks.protocol.shapes import ChatParameters, Segment, TranscriptionParameters


class Driver(ABC):
    """One loaded model, in a process of its own.

    `run` of the modality's subclass is a generator, or an async generator. A plain generator runs in a
    thread and looks at `cancelled` between items; an async one is closed when the request is cancelled.

    Attributes:
        preload: modules that the node's forkserver imports once for all runners.
        counters: shown in the node's state; `calls`, `tokens`, `cancelled` and what the driver adds.
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
