"""The surface of an adapter: what a modality means, over any driver of that modality.

Entry points of group `smi.adapters`, named as the catalogue's `task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from blocks.errors import InvalidRequest
from deployments.node.drivers.base import Driver
from tasks.protocol.inference_pb2 import Done, Event, Media, Progress

D = TypeVar("D", bound=Driver)
P = TypeVar("P", bound=BaseModel)
Emit = Callable[[Event], Awaitable[None]]
CHUNK = 256 << 10  # bytes of a media event


def streamed(emit: Emit | None) -> Emit:
    """`emit`, where there is one: what is made of bytes can only be streamed."""
    if emit is None:
        raise InvalidRequest("this answer comes piece by piece: set `stream` in the header")
    return emit


async def send(data: bytes, content_type: str, emit: Emit) -> None:
    """`data` in media events."""
    for start in range(0, len(data), CHUNK):
        await emit(Event(media=Media(data=data[start : start + CHUNK], content_type=content_type)))


def working(fraction: float) -> Event:
    """How far the work is, 0 to 1."""
    return Event(progress=Progress(stage="working", fraction=fraction))


class Adapter(ABC, Generic[D, P]):
    """Decode, chunk, call the driver, encode.

    Attributes:
        shape: the model that a request's parameters must fit.
    """

    shape: ClassVar[type[BaseModel]]

    def __init__(self, driver: D) -> None:
        self.driver = driver

    def parse(self, parameters: bytes) -> P:
        """The request's parameters, checked. Raises `InvalidRequest` naming the first bad one."""
        try:
            return self.shape.model_validate_json(parameters or b"{}")  # type: ignore[return-value]
        except ValidationError as error:
            first: Any = error.errors()[0]
            raise InvalidRequest(first["msg"], param=".".join(str(part) for part in first["loc"])) from None

    @abstractmethod
    async def run(self, parameters: P, media: AsyncIterator[bytes], emit: Emit | None) -> Done:
        """Do one request. `emit` is None when only the whole answer is wanted.

        Cancellation arrives as `asyncio.CancelledError` and must reach the driver within 100 ms.
        """
