"""Any server that speaks OpenAI's protocol (vLLM, Ollama, ...) as a runner of chat.

`source` is its base URL, such as `http://127.0.0.1:11434/v1`. The engine batches, so the catalogue's
`slots` may be as many as it works on at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from blocks.errors import (
    Busy,
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    LoadFailed,
    SmiError,
    Unavailable,
    UpstreamFailed,
)
from deployments.node.drivers.base import ChatDriver, End, Piece, Prompt
from deployments.node.drivers.options import read_options
from tasks.protocol.shapes import ChatParameters

if TYPE_CHECKING:
    import openai

CONNECT_S = 5
NO_KEY = "none"  # the SDK wants one; engines without keys do not look
LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class OpenAIOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="the model's name there; default: its name here")
    api_key_env: str | None = Field(None, description="environment variable that holds the server's key")
    silence_s: float = Field(600, gt=0, description="seconds without a byte until the server is given up")


class OpenAIDriver(ChatDriver):
    """One model of another server."""

    preload: ClassVar[tuple[str, ...]] = ("httpx", "openai", "openai.resources.chat.completions")

    def load(self) -> None:
        self.options = read_options(self.model, OpenAIOptions)
        self._name = self.options.model or self.model.name
        self._url = self.model.source.rstrip("/")
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise LoadFailed(
                f"model {self.model.name!r}: source {self.model.source!r} is no URL; "
                "give the server's base, such as http://127.0.0.1:11434/v1"
            )
        self._what = f"the engine of model {self.model.name!r} at {self._url}"
        self._check(_key(self.options.api_key_env))
        self._client = self._connect(_key(self.options.api_key_env))

    @property
    def _proxied(self) -> bool:
        return urlsplit(self._url).hostname not in LOOPBACK

    def _connect(self, key: str) -> openai.AsyncOpenAI:
        import httpx2
        import openai

        timeout = httpx2.Timeout(self.options.silence_s, connect=CONNECT_S)
        return openai.AsyncOpenAI(
            base_url=self._url,
            api_key=key,
            max_retries=0,  # whoever asked decides whether and where to try again
            timeout=timeout,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=self._proxied, timeout=timeout),
        )

    def _check(self, key: str) -> None:
        """That the server is there, lets us in and has the model."""
        import httpx

        try:
            reply = httpx.get(
                f"{self._url}/models",
                headers={"authorization": f"Bearer {key}"},
                timeout=CONNECT_S,
                trust_env=self._proxied,
            )
        except httpx.HTTPError as error:
            raise LoadFailed(
                f"{self._what} does not answer ({type(error).__name__}): start it there, or correct `source`"
            ) from error
        if reply.status_code in (401, 403):
            raise LoadFailed(f"{self._what} refuses the key: set option `api_key_env` and that variable")
        names = _names(reply)
        if not reply.is_success or names is None:
            raise LoadFailed(
                f"{self._what}: GET {self._url}/models answers {reply.status_code}, not a list of models; "
                "is `source` its base URL (most end in /v1)?"
            )
        if not {self._name, f"{self._name}:latest"} & names:
            known = ", ".join(sorted(names)[:10]) or "none"
            raise LoadFailed(
                f"{self._what} has no model {self._name!r}; set option `model` to one of: {known}"
            )

    async def run(
        self, parameters: ChatParameters, cancelled: threading.Event
    ) -> AsyncGenerator[Prompt | Piece | End, None]:
        self.counters["calls"] += 1
        with self.counting(cancelled):
            with self._told():
                stream = await self._client.chat.completions.create(**self._request(parameters))
            async with stream, aclosing(self._answer(stream)) as items:
                async for item in items:
                    yield item

    async def _answer(self, stream: Any) -> AsyncGenerator[Piece | End, None]:
        reason, usage, pieces = None, None, 0
        with self._told():
            async for chunk in stream:
                usage = chunk.usage or usage
                if not chunk.choices:
                    continue
                choice = chunk.choices[0]
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    pieces += 1
                    self.counters["tokens"] += 1
                    yield Piece(choice.delta.content)
        if reason is None:
            raise UpstreamFailed(f"{self._what} broke off its answer; try again")
        if usage is None:
            yield End(reason, 0, pieces)
        else:
            yield End(reason, usage.prompt_tokens, usage.completion_tokens)

    def _request(self, parameters: ChatParameters) -> dict[str, Any]:
        request = parameters.model_dump(exclude_none=True)
        for message in request["messages"]:
            if message["role"] == "developer":  # OpenAI's newer word, which most engines do not know
                message["role"] = "system"
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self._name, **request, **stream}

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the SDK's errors into ours."""
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            raise self._status(error) from error
        except openai.APITimeoutError as error:
            raise UpstreamFailed(f"{self._what} has been silent for too long; try again") from error
        except openai.APIConnectionError as error:
            if _refused(error):
                raise Unavailable(f"{self._what} cannot be reached; try again", retry_after=5) from error
            raise UpstreamFailed(f"{self._what} broke off its answer; try again") from error
        except (openai.APIError, ValueError) as error:
            raise UpstreamFailed(f"{self._what} sent an error within its answer; try again") from error

    def _status(self, error: openai.APIStatusError) -> SmiError:
        status, wait = error.status_code, retry_after(error.response.headers)
        detail = str(error.body.get("message", "")) if isinstance(error.body, dict) else ""
        match status:
            # vLLM gives this error no code of its own, only a text
            case 400 | 413 | 422 if error.code == "context_length_exceeded" or "context length" in detail:
                said = f"the conversation does not fit the context of {self._what}"
                return ContextLengthExceeded(said, param="messages", detail=detail)
            case 400 | 413 | 422:
                return InvalidRequest(f"{self._what} refuses the request (status {status})", detail=detail)
            case 401 | 403:
                return ConfigurationError(f"{self._what} refuses our key: check option `api_key_env`")
            case 404:
                return ConfigurationError(f"{self._what} does not know {self._name!r}: check option `model`")
            case 429:
                return Busy(f"{self._what} has too much to do", retry_after=wait)
            case 503:
                return Unavailable(f"{self._what} is not available now", retry_after=wait)
        return UpstreamFailed(f"{self._what} failed with status {status}", retry_after=wait)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from `Retry-After` as seconds or as a date; None if it says nothing."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _refused(error: BaseException) -> bool:
    """Whether no connection came about, so that nothing was done there."""
    import httpx2

    return isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout)


def _key(variable: str | None) -> str:
    if variable is None:
        return NO_KEY
    if not (key := os.environ.get(variable)):
        raise LoadFailed(f"option `api_key_env` names {variable}, which is not set in the node's environment")
    return key


def _names(reply: Any) -> set[str] | None:
    try:
        return {str(entry["id"]) for entry in reply.json()["data"] or ()}
    except (ValueError, KeyError, TypeError):
        return None
