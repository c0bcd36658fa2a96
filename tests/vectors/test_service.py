"""The vectors service by itself: who may call, and that what it took is there after a kill."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from pydantic import BaseModel

from blocks.errors import ConfigurationError
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
    Nothing,
    OfIndex,
    Owned,
    Put,
    Search,
)
from deployments.up.processes import free_port
from deployments.vectors.service import server_of
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


async def fill(service: Service, owner: int = 1) -> Service:
    """Give it an index that holds one document."""
    await service.call("drop", OfIndex(owner=owner, name="x"))
    index = Index(name="x", model="m", source="s", dimensions=4, created=1)
    assert (await service.call("create", Create(owner=owner, index=index)))[:1] == b"+"
    document = put(DOCUMENTS[0], 3).model_copy(update={"owner": owner})
    assert (await service.call("put", document))[:1] == b"+"
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
        created=1,
        document=document,
        chunks=[Chunk(number=n, page=1, start=0, end=2, heading="h", text=f"é{n}") for n in numbers],
        vectors=vectors(*numbers),
        file=file if whole else None,
    )


def search_for(one: int, created: float = 1) -> Search:
    return Search(owner=1, name="x", created=created, vector=vectors(one), top_k=10)


async def found(service: Service, one: int) -> list[tuple[str, int]]:
    answer = await service.call("search", search_for(one))
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
    short = search_for(1).model_copy(update={"vector": vectors(1)[:8]})
    assert "4 dimensions" in fault(await filled.call("search", short)).message
    twice = Create(owner=1, index=Index(name="x", model="m", source="s", dimensions=4, created=1))
    assert fault(await filled.call("create", twice)).code == "conflict"
    assert fault(await filled.call("get", Owned(owner=1))).code == "invalid_value"


async def test_what_was_meant_for_a_deleted_index_does_not_go_into_its_successor(filled: Service) -> None:
    await filled.call("drop", OfIndex(owner=1, name="x"))
    assert fault(await filled.call("put", put(DOCUMENTS[1], 1))).code == "not_found"
    another = Index(name="x", model="of the same dimensions", source="s", dimensions=4, created=1.5)
    assert (await filled.call("create", Create(owner=1, index=another)))[:1] == b"+"
    for operation, late in (("put", put(DOCUMENTS[1], 1)), ("search", search_for(1))):
        told = fault(await filled.call(operation, late))
        assert (told.code, told.param) == ("conflict", "index")
        assert "index 'x' was deleted meanwhile, and another made of that name" in told.message
    answer = await filled.call("search", search_for(1, created=1.5))
    assert Hits.model_validate_json(answer[1:]).data == []


class Stuck:
    """A store that writes until it is told to end."""

    def __init__(self) -> None:
        self.end, self.writing, self.most = threading.Event(), 0, 0

    def put(self, asked: Put) -> Nothing:
        self.writing += 1
        self.most = max(self.most, self.writing)
        self.end.wait(20)
        self.writing -= 1
        return Nothing()

    def search(self, asked: Search) -> Hits:
        return Hits(data=[])

    create = indexes = get = drop = files = remove = search


async def test_however_many_write_others_search(folder: Path) -> None:
    stuck, target = Stuck(), f"unix:{folder}/stuck.sock"
    server = server_of(stuck, TOKEN, target)  # type: ignore[arg-type]
    await server.start()
    metadata = ((METADATA, call_proof(TOKEN, AUDIENCE)),)
    async with grpc.aio.insecure_channel(target) as channel:

        def call(operation: str, asked: BaseModel) -> Any:
            method = channel.unary_unary(METHOD + operation)
            return method(asked.model_dump_json().encode(), metadata=metadata, timeout=10)

        writes = [call("put", put(DOCUMENTS[0], 1)) for _ in range(20)]
        async with asyncio.timeout(10):
            while not stuck.writing:
                await asyncio.sleep(0.01)
        assert await call("search", search_for(1)) == b'+{"data":[]}'
        assert not any(write.done() for write in writes)
        stuck.end.set()
        assert set(await asyncio.gather(*writes)) == {b"+{}"}
    assert stuck.most == 1  # they took turns
    await server.stop(1)


@pytest.mark.parametrize("target", ["0.0.0.0:9", "[::]:9", ":9", "192.0.2.1:9", "vectors.example:9"])
async def test_documents_never_cross_the_network_unencrypted(target: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{re.escape(repr(target))}.*unencrypted"):
        server_of(Stuck(), TOKEN, target)  # type: ignore[arg-type]


ELSEWHERE = """
import asyncio
from tasks.vectors import get_index, list_files
print(asyncio.run(get_index("x")).dimensions, [file.name for file in asyncio.run(list_files("x"))])
"""


async def test_a_process_with_a_home_of_its_own_reaches_it_at_a_port(folder: Path) -> None:
    """As one on another machine does through a tunnel."""
    home, elsewhere = (Path(tempfile.mkdtemp(prefix="t-", dir=folder)) for _ in range(2))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    service = Service(home, SMI_VECTORS_URL=address)
    service.target = address
    try:
        await fill(service, owner=0)  # whom a run without a key works for
        joined = {
            "SMI_HOME": str(elsewhere),
            "SMI_JOIN_TOKEN": TOKEN,
            "SMI_VECTORS_URL": address,
            "SMI_PREFECT_URL": "http://127.0.0.1:1/api",
            "SMI_PREFECT_AUTH": "a:b",
        }
        command = [sys.executable, "-c", ELSEWHERE]
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **joined}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        said, complaint = await process.communicate()
        assert said == b"4 ['n.md']\n", complaint
        second = Service(elsewhere, SMI_VECTORS_URL=address)
        assert await asyncio.to_thread(second.process.wait, 60) == 1  # the port is taken, not shared
    finally:
        service.kill()


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
            answer = await service.call("search", search_for(1))
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
