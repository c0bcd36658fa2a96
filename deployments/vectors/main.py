"""The process that owns the vectors.

pymilvus brings pandas and costs every process that imports it a second and 57 MB, so only this one does;
API, workers and nodes speak a few small messages with it (`tasks/vectors.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from blocks.errors import ConfigurationError
from blocks.settings import Settings
from deployments.vectors.service import server_of

if TYPE_CHECKING:
    from deployments.vectors.store import Store

LITE = "unix:milvus.sock"  # below the folder that this process works in: a path of any length will do
GRACE_S = 2
CHATTY = ("pymilvus", "milvus_lite", "faiss", "grpc._server")  # they print requests; we tell our callers

log = logging.getLogger("smi.vectors")


async def serve_vectors(settings: Settings) -> None:
    """Serve the indexes until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a package or setting is missing, another process owns the folder, or
            `vectors_url` is no address to listen at.
    """
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    with ExitStack() as stack:
        store = await asyncio.to_thread(_open, settings, stack)
        server = server_of(store, settings.require("join_token"), settings.vectors)
        await server.start()
        log.info("vectors at %s", settings.vectors)
        await stopping.wait()
        await server.stop(GRACE_S)


def _open(settings: Settings, stack: ExitStack) -> Store:
    """The indexes; `stack` closes them."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        from deployments.vectors.store import Store
    except ImportError as error:
        raise ConfigurationError(
            f"vectors need the package {error.name}; run `pip install 'smi[rag]'`"
        ) from error
    if settings.vectors.startswith("unix:"):
        _private(Path(settings.vectors.removeprefix("unix:")).parent)
    token = settings.milvus_token.get_secret_value() if settings.milvus_token else ""
    uri = settings.milvus_url
    if uri is None:
        uri = _start_lite(settings.home / "vectors", stack)
    store = Store(uri, token, lite=settings.milvus_url is None)
    stack.callback(store.close)
    if settings.milvus_url is None:
        store.connected()  # now, rather than at the first request
    return store


def _start_lite(folder: Path, stack: ExitStack) -> str:
    """Milvus Lite on the data in `folder`, at a socket that only this user reaches; its URI."""
    from milvus_lite.adapter.grpc.server import _build_server
    from milvus_lite.db import MilvusLite
    from milvus_lite.exceptions import DataDirLockedError

    _private(folder)
    os.chdir(folder)
    try:
        data = MilvusLite("data")
    except DataDirLockedError as error:
        raise ConfigurationError(f"another process owns {folder}: one `smi vectors` per home") from error
    stack.callback(data.close)
    server = _build_server(data, 8)
    server.add_insecure_port(LITE)
    server.start()
    stack.callback(lambda: server.stop(GRACE_S).wait(GRACE_S + 1))
    return LITE


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
