"""The vectors service over gRPC. Every call proves that it knows the join token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from pydantic import BaseModel, ValidationError

from blocks.errors import SmiError
from blocks.validation import told
from blocks.vectors import AUDIENCE, METHOD, Create, Fault, OfIndex, Owned, Put, Remove, Search
from deployments.vectors.store import Store
from tasks.protocol.auth import METADATA, Gate
from tasks.protocol.client import CHANNEL_OPTIONS

THREADS = 8

log = logging.getLogger("smi.vectors")
Operation = Callable[[Any], BaseModel]


class _Handler(grpc.GenericRpcHandler):
    """Finds the operation of a method, checks who calls, and tells errors as `Fault`."""

    def __init__(self, store: Store, token: str) -> None:
        self._gate = Gate(token, AUDIENCE)
        self._operations: dict[str, tuple[type[BaseModel], Operation]] = {
            "create": (Create, store.create),
            "list": (Owned, store.indexes),
            "get": (OfIndex, store.get),
            "drop": (OfIndex, store.drop),
            "put": (Put, store.put),
            "files": (OfIndex, store.files),
            "remove": (Remove, store.remove),
            "search": (Search, store.search),
        }

    def service(self, call: Any) -> Any:
        name = call.method.removeprefix(METHOD)
        if name not in self._operations:
            return None
        shape, operation = self._operations[name]

        def answer(body: bytes, context: grpc.ServicerContext) -> bytes:
            proof = dict(context.invocation_metadata()).get(METADATA, "")
            if not self._gate.admits(str(proof)):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "a call must prove that it knows the token")
            return _answer(name, shape, operation, body)

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


def server_of(store: Store, token: str, target: str) -> grpc.Server:
    """A server at `target` (`unix:PATH` or `host:port`), not started yet."""
    server = grpc.server(
        ThreadPoolExecutor(THREADS, "vectors"),
        handlers=[_Handler(store, token)],
        options=[option for option in CHANNEL_OPTIONS if "message_length" in option[0]],
    )
    server.add_insecure_port(target)
    return server
