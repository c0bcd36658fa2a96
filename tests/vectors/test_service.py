"""The vectors service by itself: who may call, and that what it took is there after a kill."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from pydantic import BaseModel

from blocks.vectors import (
    AUDIENCE,
    METHOD,
    Chunk,
    Create,
    Fault,
    File,
    Files,
    Hits,
    Index,
    OfIndex,
    Owned,
    Put,
    Search,
)
from deployments.up.processes import free_port
from tasks.protocol.auth import METADATA, call_proof

TOKEN = "join-token-of-the-tests"
DOCUMENTS = [f"doc_{letter * 24}" for letter in "ab"]


class Service:
    """A process with a folder of its own."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home, self.settings = home, settings
        self.target = f"unix:{home}/vectors/service.sock"
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "SMI_HOME": str(self.home), "SMI_JOIN_TOKEN": TOKEN, **self.settings}
        command = [sys.executable, "-P", "-m", "deployments", "vectors"]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def call(self, operation: str, asked: BaseModel, proof: str | None = None) -> bytes:
        metadata = ((METADATA, call_proof(TOKEN, AUDIENCE) if proof is None else proof),)
        async with grpc.aio.insecure_channel(self.target) as channel:
            await channel.channel_ready()
            call = channel.unary_unary(METHOD + operation)
            answer: bytes = await call(asked.model_dump_json().encode(), metadata=metadata)
            return answer


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    home = Path(tempfile.mkdtemp(prefix="v-", dir=folder))
    running = Service(home)
    yield running
    running.process.terminate()
    assert running.process.wait(10) == 0


@pytest.fixture
async def filled(service: Service) -> Service:
    return await fill(service)


async def fill(service: Service) -> Service:
    """Give it an index that holds one document."""
    await service.call("drop", OfIndex(owner=1, name="x"))
    index = Index(name="x", model="m", source="s", dimensions=4, created=1)
    assert (await service.call("create", Create(owner=1, index=index)))[:1] == b"+"
    assert (await service.call("put", put(DOCUMENTS[0], 3)))[:1] == b"+"
    return service


def vectors(*ones: int) -> str:
    values = array("f", [float(at == one % 4) for one in ones for at in range(4)])
    return base64.b64encode(values.tobytes()).decode()


def put(document: str, chunks: int, whole: bool = True) -> Put:
    file = File(
        id=document,
        name="n.md",
        content_type="text/plain",
        bytes=3,
        pages=1,
        chunks=chunks,
        pages_without_text=[],
        created=2,
    )
    first = 0 if whole else 1
    numbers = range(first, chunks)
    return Put(
        owner=1,
        name="x",
        document=document,
        chunks=[Chunk(number=n, page=1, start=0, end=2, heading="h", text=f"é{n}") for n in numbers],
        vectors=vectors(*numbers),
        file=file if whole else None,
    )


async def found(service: Service, one: int) -> list[tuple[str, int]]:
    answer = await service.call("search", Search(owner=1, name="x", vector=vectors(one), top_k=10))
    assert answer[:1] == b"+", answer
    return [(hit.document, hit.chunk) for hit in Hits.model_validate_json(answer[1:]).data]


def fault(answer: bytes) -> Fault:
    assert answer[:1] == b"-", answer
    return Fault.model_validate_json(answer[1:])


async def test_what_it_took_is_there_after_a_kill_and_half_a_document_is_not(filled: Service) -> None:
    assert (await filled.call("put", put(DOCUMENTS[1], 3, whole=False)))[:1] == b"+"
    before = await found(filled, 1)
    assert before[0] == (DOCUMENTS[0], 1)
    assert {document for document, _ in before} == {DOCUMENTS[0]}
    filled.kill()
    filled.start()
    assert await found(filled, 1) == before
    files = Files.model_validate_json((await filled.call("files", OfIndex(owner=1, name="x")))[1:])
    assert [(file.id, file.name, file.chunks) for file in files.data] == [(DOCUMENTS[0], "n.md", 3)]
    assert (await filled.call("put", put(DOCUMENTS[0], 1)))[:1] == b"+"  # with fewer chunks than before
    assert await found(filled, 1) == [(DOCUMENTS[0], 0)]


async def test_only_who_knows_the_token_is_answered_and_nobody_sees_anothers(filled: Service) -> None:
    for proof in ("", "1.00", call_proof("another", AUDIENCE), call_proof(TOKEN, "127.0.0.1:1")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await filled.call("list", Owned(owner=1), proof)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    stranger = fault(await filled.call("get", OfIndex(owner=2, name="x")))
    assert (stranger.code, stranger.message) == ("not_found", "index 'x' does not exist; there are: none")
    assert (filled.home / "vectors").stat().st_mode & 0o077 == 0


async def test_what_does_not_fit_is_told(filled: Service) -> None:
    short = Search(owner=1, name="x", vector=vectors(1)[:8], top_k=1)
    assert "4 dimensions" in fault(await filled.call("search", short)).message
    twice = Create(owner=1, index=Index(name="x", model="m", source="s", dimensions=4, created=1))
    assert fault(await filled.call("create", twice)).code == "conflict"
    assert fault(await filled.call("get", Owned(owner=1))).code == "invalid_value"


def test_a_second_process_on_the_folder_is_told(service: Service) -> None:
    until = time.monotonic() + 30
    while not Path(service.target.removeprefix("unix:")).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    command = [sys.executable, "-P", "-m", "deployments", "vectors", "--home", str(service.home)]
    environment = {**os.environ, "SMI_JOIN_TOKEN": TOKEN}
    second = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert second.returncode == 1
    assert f"another process owns {service.home}/vectors" in second.stderr


def start_milvus(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "milvus_lite", "server", f"--data-dir={folder}", f"--port={port}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--host=127.0.0.1"], **quiet)  # type: ignore[call-overload,no-any-return]


async def until_found(service: Service) -> list[tuple[str, int]]:
    async with asyncio.timeout(60):
        while True:
            answer = await service.call("search", Search(owner=1, name="x", vector=vectors(1), top_k=1))
            if answer[:1] == b"+":
                return await found(service, 1)
            assert fault(answer).code == "unavailable"
            await asyncio.sleep(0.2)


async def test_a_milvus_server_by_url_that_goes_and_comes_back(folder: Path) -> None:
    home, port = Path(tempfile.mkdtemp(prefix="m-", dir=folder)), free_port("127.0.0.1")
    milvus = start_milvus(home / "milvus", port)
    service = Service(home, SMI_MILVUS_URL=f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            while (await service.call("list", Owned(owner=1)))[:1] != b"+":
                await asyncio.sleep(0.2)
        await fill(service)
        before = await until_found(service)
        assert before[0] == (DOCUMENTS[0], 1)
        listed = Files.model_validate_json((await service.call("files", OfIndex(owner=1, name="x")))[1:])
        assert [file.id for file in listed.data] == [DOCUMENTS[0]]
        milvus.kill()
        milvus.wait()
        began = time.monotonic()
        away = fault(await service.call("get", OfIndex(owner=1, name="x")))
        assert (away.code, away.message) == ("unavailable", "the Milvus server does not answer; try again")
        assert time.monotonic() - began < 10
        milvus = start_milvus(home / "milvus", port)
        assert await until_found(service) == before
    finally:
        service.kill()
        milvus.kill()
        milvus.wait()
