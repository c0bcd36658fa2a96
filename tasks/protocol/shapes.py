"""What `Header.parameters` and `Done.result` hold for each adapter: JSON, as these models define it.

Kept apart from the steps so that a runner's process need not import Prefect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Role = Literal["system", "developer", "user", "assistant"]


def _flat(content: Any) -> Any:
    """OpenAI's list of text parts as one text; other parts are refused by name."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"{kind!r} " if isinstance(kind, str) and len(kind) <= 32 else ""
            raise ValueError(f"content part {named}is not supported here; give text")
        texts.append(part["text"])
    return "\n".join(texts)


Content = Annotated[str, BeforeValidator(_flat)]


class Parameters(BaseModel):
    """What an adapter is told. A request of the API may be a subclass with fields of its own."""

    model_config = ConfigDict(extra="forbid")
    _wired: ClassVar[set[str]] = set()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if Parameters in cls.__bases__:
            cls._wired = set(cls.model_fields)

    def wire(self) -> bytes:
        """JSON of the adapter's own fields, for `Header.parameters`."""
        return self.model_dump_json(include=self._wired, exclude_none=True).encode()


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    content: Content
    name: str | None = None


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
ChatTemperature = Annotated[float, Field(ge=0, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ChatParameters(Parameters):
    """Adapter `chat`. OpenAI's names and meanings."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    temperature: ChatTemperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] | None,
        BeforeValidator(_as_list),
    ] = None


class ChatResult(BaseModel):
    text: str


class TranscriptionParameters(Parameters):
    """Adapter `transcription`."""

    language: str | None = Field(None, description="ISO 639-1; found out when absent")
    prompt: str | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] = 0


class Segment(BaseModel):
    """A stretch of speech; times in seconds from the start of the audio."""

    start: float
    end: float
    text: str


class TranscriptionResult(BaseModel):
    text: str
    language: str
    duration: float
    segments: list[Segment]
