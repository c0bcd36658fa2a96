"""The vectors service over gRPC. Every call proves that it knows the join token.

Writes take turns in a thread of their own, so that however many wait, searches do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from pydantic import BaseModel, ValidationError

from blocks.errors import SmiError
from blocks.validation import told
from blocks.vectors import AUDIENCE, METHOD, Create, Fault, OfIndex, Owned, Put, Remove, Search
from deployments.listen import SERVER_OPTIONS, bind
from tasks.protocol.auth import METADATA, Gate

if TYPE_CHECKING:
    from deployments.vectors.store import Store

READERS = 8  # threads

log = logging.getLogger("smi.vectors")
Operation = Callable[[Any], BaseModel]


class _Handler(grpc.GenericRpcHandler):
    """Finds the operation of a method, checks who calls, and tells errors as `Fault`."""

    def __init__(self, store: Store, token: str) -> None:
        self._gate = Gate(token, AUDIENCE)
        readers, writer = ThreadPoolExecutor(READERS, "vectors-read"), ThreadPoolExecutor(1, "vectors-write")
        self._operations: dict[str, tuple[type[BaseModel], Operation, ThreadPoolExecutor]] = {
            "create": (Create, store.create, writer),
            "list": (Owned, store.indexes, readers),
            "get": (OfIndex, store.get, readers),
            "drop": (OfIndex, store.drop, writer),
            "put": (Put, store.put, writer),
            "files": (OfIndex, store.files, readers),
            "remove": (Remove, store.remove, writer),
            "search": (Search, store.search, readers),
        }

    def service(self, call: Any) -> Any:
        name = call.method.removeprefix(METHOD)
        if name not in self._operations:
            return None
        shape, operation, threads = self._operations[name]

        async def answer(body: bytes, context: Any) -> bytes:
            proof = dict(context.invocation_metadata()).get(METADATA, "")
            if not self._gate.admits(str(proof)):
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "a call must prove that it knows the token"
                )
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, _answer, name, shape, operation, body)

        return grpc.unary_unary_rpc_method_handler(answer)


def _answer(name: str, shape: type[BaseModel], operation: Operation, body: bytes) -> bytes:
    """`+` and the answer, or `-` and a `Fault`."""
    try:
        return b"+" + operation(shape.model_validate_json(body)).model_dump_json().encode()
    except ValidationError as error:
        fault: SmiError = told(error)
    except SmiError as error:
        fault = error
    except Exception as error:  # gRPC would send its text, and content with it, to the caller
        log.error("%s failed: %s", name, type(error).__name__, exc_info=error)
        fault = SmiError("the vectors service failed; its log says where")
    return b"-" + _fault(fault).model_dump_json().encode()


def _fault(error: SmiError) -> Fault:
    return Fault(
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after=error.retry_after,
        detail=error.detail,
    )


def server_of(store: Store, token: str, target: str) -> grpc.aio.Server:
    """A server at `target`, `unix:PATH` or `host:port` on loopback, not started yet.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    server = grpc.aio.server(handlers=[_Handler(store, token)], options=SERVER_OPTIONS)
    bind(server, target, "SMI_VECTORS_URL", "SMI_VECTORS_URL")
    return server
