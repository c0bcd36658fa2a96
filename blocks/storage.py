"""Files by reference: requests and results of jobs, and media. Any fsspec filesystem; a folder by default.

A reference is a path below the storage's root, such as `jobs/job_1/request.json`. Content travels
between processes by reference and never as a Prefect parameter.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, Self, cast

import fsspec
from pydantic import BaseModel, ConfigDict, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from blocks.errors import InvalidRequest, NotFound, SmiError, StorageNotShared

CHUNK = 256 * 1024


class Storage:
    """Files below one fsspec URL.

    Example:
        >>> storage = Storage("memory://doc")
        >>> storage.write("jobs/1/result.json", b"{}")
        >>> storage.read("jobs/1/result.json")
        b'{}'
    """

    def __init__(self, url: str) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url)
        scheme, found, rest = url.partition("://")
        self.name = f"{scheme}{found}{rest.rpartition('@')[2]}" if found else url  # without credentials

    def path(self, reference: str) -> str:
        """The path of `reference` in the filesystem; one that leads out of the root is `NotFound`."""
        clean = posixpath.normpath(posixpath.join("/", reference))
        if clean.lstrip("/") != reference:
            raise NotFound(f"no such reference: {reference!r}")
        return f"{self._root}{clean}"

    def write(self, reference: str, data: bytes | BinaryIO) -> None:
        """Store `data`; readers see all of it or nothing."""
        path = self.path(reference)
        self._files.makedirs(posixpath.dirname(path), exist_ok=True)
        part = f"{path}.{secrets.token_hex(4)}.part"  # two attempts of one job may write at once
        with self._files.open(part, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                while block := data.read(CHUNK):
                    file.write(block)
        self._files.mv(part, path)

    def open(self, reference: str) -> IO[bytes]:
        try:
            return cast(IO[bytes], self._files.open(self.path(reference), "rb"))
        except FileNotFoundError:
            raise NotFound(f"no such reference: {reference!r}") from None

    def read(self, reference: str) -> bytes:
        with self.open(reference) as file:
            return file.read()

    def read_shared(self, reference: str) -> bytes:
        """What another machine may have stored, and has for sure.

        Raises:
            StorageNotShared: it is not here; with what to set.
        """
        try:
            return self.read(reference)
        except NotFound:
            raise self.not_shared(reference) from None

    def not_shared(self, reference: str) -> StorageNotShared:
        return StorageNotShared(
            f"storage {self.name} of machine {socket.gethostname()} does not have {reference}: machines need "
            "shared storage. Set SMI_STORAGE_URL to the same place for the API, the jobs processor and every "
            "node: s3://bucket/folder, or file:///folder of a folder that all of them mount"
        )

    def exists(self, reference: str) -> bool:
        return bool(self._files.exists(self.path(reference)))

    def remove(self, prefix: str) -> None:
        """Remove a reference and all below it; one that is not there is no error."""
        if self._files.exists(self.path(prefix)):
            self._files.rm(self.path(prefix), recursive=True)


class Media(BaseModel):
    """Bytes that a request brings or a step makes: stored (`reference`), a local file (`path`), or open here.

    Serialised, it is its reference or path; what is open exists only in the process that holds it.

    Attributes:
        name: a file name; of what a job made, the name below the job's files.
        content_type: MIME type of what we made; of what a client brought, empty.
        size: bytes of what we made.
    """

    model_config = ConfigDict(extra="forbid")

    reference: str | None = None
    path: str | None = None
    name: str = ""
    content_type: str = ""
    size: int | None = None
    _file: BinaryIO | None = PrivateAttr(None)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def upload(cls, file: BinaryIO, name: str = "", content_type: str = "", size: int | None = None) -> Self:
        media = cls(name=name, content_type=content_type, size=size)
        media._file = file
        return media

    def open(self, storage: Storage) -> BinaryIO:
        """The bytes from their start. May be called again: a step that is tried anew reads anew.

        Raises:
            SmiError: they cannot be had; `NotFound`, `InvalidRequest` or, if trying again may help, plain.
        """
        with self._in_words():
            if self._file is not None:
                self._file.seek(0)
                return self._file
            if self.reference is not None:
                return cast(BinaryIO, storage.open(self.reference))
            if self.path is not None:
                return open(self.path, "rb")
        raise NotFound("the request names no media: give `reference` or `path`")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What the system says of a file, as an error that names it."""
        what = f"file {self.path!r}" if self.path is not None else f"media {self.reference or self.name!r}"
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{what} does not exist") from None
        except (IsADirectoryError, PermissionError) as error:
            why = "it is a folder" if isinstance(error, IsADirectoryError) else "permission denied"
            raise InvalidRequest(f"{what} cannot be read: {why}") from None
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise SmiError(f"{what} cannot be read: {why}", retryable=True) from None

    async def chunks(self, storage: Storage) -> AsyncIterator[bytes]:
        """The bytes in pieces of 256 KiB, read off the event loop."""
        if self._file is not None:
            offset = 0
            while block := await asyncio.to_thread(self._read_at, offset):
                offset += len(block)
                yield block
            return
        with await asyncio.to_thread(self.open, storage) as file:
            while block := await asyncio.to_thread(self._read, file):
                yield block

    def _read(self, file: BinaryIO) -> bytes:
        with self._in_words():
            return file.read(CHUNK)

    def _read_at(self, offset: int) -> bytes:
        # Two tries of one upload may overlap: the reader that gave up is still in its last read.
        assert self._file is not None
        with self._lock, self._in_words():
            self._file.seek(offset)
            return self._file.read(CHUNK)

    @model_serializer(mode="wrap")
    def _said(self, serialised: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not known."""
        return {name: value for name, value in serialised(self).items() if value not in (None, "")}

    def model_post_init(self, context: Any) -> None:
        if self.reference is not None and self.path is not None:
            raise ValueError("give reference or path, not both")


class Recording(Media):
    """Sound."""


class Picture(Media):
    """A still picture."""


class Document(Media):
    """Something to read: text, Markdown, PDF."""
