"""A third party's plug-in, found by entry point: an adapter that weighs media, and a driver in a thread."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator

from pydantic import BaseModel

from deployments.node.adapters.base import Adapter, Emit
from deployments.node.drivers.base import ChatDriver, Driver, End, Piece, Prompt
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import ChatParameters


class TallyParameters(BaseModel):
    pause_s: float = 0
    broken: bool = False


class TallyDriver(Driver):
    """Has nothing to load."""

    def load(self) -> None:
        self.counters["chunks"] = 0


class TallyAdapter(Adapter[TallyDriver, TallyParameters]):
    """Length and hash of the media, read at the pace asked for."""

    shape = TallyParameters

    async def run(self, parameters: TallyParameters, media: AsyncIterator[bytes], emit: Emit | None) -> Done:
        if parameters.broken:
            raise KeyError("a secret prompt")
        size, digest = 0, hashlib.sha256()
        async for chunk in media:
            self.driver.counters["chunks"] += 1
            size += len(chunk)
            digest.update(chunk)
            await asyncio.sleep(parameters.pause_s)
        return Done(result=json.dumps({"size": size, "sha256": digest.hexdigest()}).encode())


class ThreadedDriver(ChatDriver):
    """Says "tick" for ever; on cancel it takes `linger_s` to end."""

    def load(self) -> None:
        self.linger_s = float(self.model.options.get("linger_s", 0))

    def run(self, parameters: ChatParameters, cancelled: threading.Event) -> Iterator[Prompt | Piece | End]:
        self.counters["calls"] += 1
        yield Prompt(1)
        while not cancelled.wait(0.01):
            yield Piece("tick ")
        self.counters["cancelled"] += 1
        self.counters["cancelled_at"] = time.time()
        time.sleep(self.linger_s)
        self.counters["ended"] += 1
