"""One tree of errors. Each kind has a code, a message fit for the user, and says whether to try again.

It maps once to HTTP (`status`, OpenAI's `type`), to gRPC (`grpc_status`) and to the wire
(`code` travels in the protocol's `Error`; `from_code` makes it an exception again).
"""

from __future__ import annotations

from typing import ClassVar


class SmiError(Exception):
    """Something the user is told. `message` names the bad value and what would be right.

    Args:
        message: for the user, records and logs; never a prompt, a secret or a stack trace.
        detail: for the user alone: what another system said, which may quote the request.
        retryable: whether trying again may help; None means as it is with errors of this kind.
        param: the request's parameter at fault, by its path (`messages[0].role`).
        retry_after: seconds after which trying again makes sense.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        detail: str = "",
        retryable: bool | None = None,
    ) -> None:
        self.message = storable(message)
        super().__init__(self.message)
        self.param = storable(param) if param is not None else None
        self.retry_after = retry_after
        self.detail = storable(detail)
        if retryable is not None:
            self.retryable = retryable

    @property
    def whole(self) -> str:
        """Message and detail, for the user."""
        return f"{self.message}: {self.detail}" if self.detail else self.message


def storable(text: str) -> str:
    """`text` without what neither UTF-8 nor PostgreSQL takes: lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class InvalidRequest(SmiError):
    """The request cannot be honoured as it is."""

    code, status, type, grpc_status = "invalid_value", 400, "invalid_request_error", "INVALID_ARGUMENT"


class UnknownParameter(InvalidRequest):
    """A parameter that does not exist."""

    code = "unknown_parameter"


class UnsupportedParameter(UnknownParameter):
    """A parameter that others honour and this server does not yet."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested answer do not fit the model's context."""

    code = "context_length_exceeded"


class InvalidMedia(InvalidRequest):
    """The uploaded bytes are not what they should be: empty, truncated, another format."""

    code = "invalid_media"


class PayloadTooLarge(InvalidRequest):
    code, status = "payload_too_large", 413


class Unauthenticated(SmiError):
    code, status, type, grpc_status = "invalid_api_key", 401, "authentication_error", "UNAUTHENTICATED"


class PermissionDenied(SmiError):
    code, status, type, grpc_status = "permission_denied", 403, "permission_error", "PERMISSION_DENIED"


class NotFound(SmiError):
    code, status, type, grpc_status = "not_found", 404, "invalid_request_error", "NOT_FOUND"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(SmiError):
    """The same idempotency key with another request; a job that is already over."""

    code, status, type, grpc_status = "conflict", 409, "invalid_request_error", "ALREADY_EXISTS"


class Cancelled(SmiError):
    """The client left or asked to stop. 499 as nginx says it."""

    code, status, type, grpc_status = "cancelled", 499, "request_cancelled", "CANCELLED"


class Unavailable(SmiError):
    """Nobody can serve this now: no node, all busy, or still loading. Try again after `retry_after`."""

    code, status, type, grpc_status, retryable = "unavailable", 503, "server_error", "UNAVAILABLE", True


class Busy(Unavailable):
    """Every slot and every place in the queue is taken."""

    code = "overloaded"


class NotAdmitted(Unavailable):
    """A node or runner could not be reached, or is leaving: nothing of the request was done there."""

    code = "not_admitted"


class OutOfMemory(Unavailable):
    """The model does not fit into what is free, even after evicting what is idle."""

    code, grpc_status = "out_of_memory", "RESOURCE_EXHAUSTED"


class RunnerDied(SmiError):
    """The model's process ended while it worked on this request. The next request starts it anew."""

    code, status, grpc_status, retryable = "runner_died", 502, "UNAVAILABLE", True


class UpstreamFailed(SmiError):
    """An external engine (vLLM, Ollama, ...) answered with an error or broke off."""

    code, status, grpc_status, retryable = "upstream_failed", 502, "UNAVAILABLE", True


class RunLost(SmiError):
    """The flow run ended, its worker with it perhaps, and left neither result nor error."""

    code, status, grpc_status, retryable = "run_lost", 502, "UNAVAILABLE", True


class DeadlineExceeded(SmiError):
    code, status, type, grpc_status, retryable = (
        "deadline_exceeded",
        504,
        "timeout_error",
        "DEADLINE_EXCEEDED",
        True,
    )


class LoadFailed(SmiError):
    """A model could not be loaded: weights missing or broken, package not installed."""

    code, status = "load_failed", 500


class StepsFailed(SmiError):
    """Steps of a pipeline failed; the others' results are kept. Retryable if each of theirs is."""

    code = "steps_failed"


class ConfigurationError(SmiError):
    """A setting is missing or wrong; the message names key, value and cure."""

    code = "configuration_error"


class StorageNotShared(ConfigurationError):
    """A machine's storage does not have what another machine stored."""

    code = "storage_not_shared"


def _tree(kind: type[SmiError]) -> list[type[SmiError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {kind.code: kind for kind in reversed(_tree(SmiError))}


def from_code(
    code: str,
    message: str,
    *,
    param: str | None = None,
    retry_after: float | None = None,
    detail: str = "",
    retryable: bool | None = None,
) -> SmiError:
    """The exception that `code` names on the wire; an unknown code is a plain `SmiError`."""
    kind = _BY_CODE.get(code, SmiError)
    return kind(message, param=param, retry_after=retry_after, detail=detail, retryable=retryable)
