"""Storage by reference."""

import errno
import io
from pathlib import Path

import pytest

from blocks.errors import InvalidRequest, NotFound, SmiError
from blocks.storage import Media, Picture, Storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"file://{tmp_path}/storage")


def test_what_is_written_is_read(storage: Storage) -> None:
    storage.write("a/b.bin", io.BytesIO(b"x" * 600_000))
    assert storage.read("a/b.bin") == b"x" * 600_000
    assert storage.exists("a/b.bin")
    storage.remove("a")
    storage.remove("a")
    assert not storage.exists("a/b.bin")


@pytest.mark.parametrize("reference", ["../secret", "/etc/passwd", "a/../../secret", "", "a//b", "a/./b"])
def test_a_reference_never_leads_out_of_the_root(storage: Storage, tmp_path: Path, reference: str) -> None:
    (tmp_path / "secret").write_text("hush")
    with pytest.raises(NotFound, match="no such reference"):
        storage.read(reference)


async def test_media_can_be_read_again_by_a_second_try(storage: Storage) -> None:
    storage.write("clip", b"y" * 300_000)
    for media in (Media(reference="clip"), Media.upload(io.BytesIO(b"y" * 300_000))):
        for _ in range(2):
            assert b"".join([chunk async for chunk in media.chunks(storage)]) == b"y" * 300_000


def test_media_serialises_to_its_reference_only(storage: Storage) -> None:
    media = Media.upload(io.BytesIO(b"secret bytes"), name="q.wav")
    assert "secret" not in media.model_dump_json()


def test_media_says_only_what_is_known(storage: Storage) -> None:
    media = Picture(reference="a", content_type="image/png")
    assert media.model_dump() == {"reference": "a", "content_type": "image/png"}
    assert Picture.model_validate_json(media.model_dump_json()).model_dump() == media.model_dump()


class Broken(io.BytesIO):
    """A file whose disk is gone."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("media", "kind", "said"),
    [
        (Media(path="nope.wav"), NotFound, "file 'nope.wav' does not exist"),
        (Media(path="/"), InvalidRequest, "file '/' cannot be read: it is a folder"),
        (Media(reference="jobs/1/x"), NotFound, "no such reference: 'jobs/1/x'"),
        (Media.upload(Broken(), name="q.wav"), SmiError, "media 'q.wav' cannot be read: Input/output error"),
        (Media(), NotFound, "the request names no media"),
    ],
)
async def test_media_that_cannot_be_had_is_named(
    storage: Storage, media: Media, kind: type[SmiError], said: str
) -> None:
    with pytest.raises(SmiError) as told:
        _ = [chunk async for chunk in media.chunks(storage)]
    assert type(told.value) is kind
    assert told.value.message.startswith(said)
    assert told.value.retryable is (kind is SmiError)


async def test_two_readers_of_one_upload_do_not_disturb_each_other(storage: Storage) -> None:
    data = bytes(range(256)) * 4096
    media = Media.upload(io.BytesIO(data))
    first, second = media.chunks(storage), media.chunks(storage)
    read = [[await anext(first), await anext(second)] for _ in range(len(data) // (256 * 1024))]
    assert b"".join(one for one, _ in read) == b"".join(other for _, other in read) == data
