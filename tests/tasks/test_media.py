"""tasks/media.py in a live run: what becomes of the bytes."""

from __future__ import annotations

from typing import Any

import pytest

from blocks.storage import Recording, Storage
from tasks import media
from tasks.live import LiveRun, entered
from tasks.media import MediaDelta, produce
from tasks.protocol.inference_pb2 import Done, Event, Media
from tasks.protocol.shapes import SpeechParameters


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def infer(*_: Any, on_event: Any, **__: Any) -> Done:
        for data in (b"one ", b"two"):
            await on_event(Event(media=Media(data=data, content_type="audio/pcm")))
        return Done()

    monkeypatch.setattr(media, "infer", infer)


async def made() -> Recording:
    recording, _ = await produce("speech", "", SpeechParameters(input="x"), kind=Recording, name="speech.pcm")
    assert (recording.name, recording.content_type, recording.size) == ("speech.pcm", "audio/pcm", 7)
    return recording


async def test_a_client_that_takes_it_as_it_comes_has_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SpooledTemporaryFile", None)  # there is no file
    run, deltas = LiveRun("speak", "r-1"), list[MediaDelta]()

    async def sink(delta: MediaDelta) -> None:
        deltas.append(delta)

    run.sink = sink
    with entered(run):
        await made()
    assert deltas == [MediaDelta(b"one ", "audio/pcm"), MediaDelta(b"two", "audio/pcm")]


async def test_another_client_has_a_file_of_it(tmp_path: Any) -> None:
    with entered(LiveRun("speak", "r-1")):
        recording = await made()
    with recording.open(Storage(f"file://{tmp_path}")) as file:
        assert file.read() == b"one two"
