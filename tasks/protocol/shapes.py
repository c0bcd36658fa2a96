"""What `Header.parameters` and `Done.result` hold for each adapter: JSON, as these models define it.

Kept apart from the steps so that a runner's process need not import Prefect.
"""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from blocks.validation import quoted

Role = Literal["system", "developer", "user", "assistant"]


def _flat(content: Any) -> Any:
    """OpenAI's list of text parts as one text; other parts are refused by name."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"{quoted(kind)} " if isinstance(kind, str) else ""
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

    def markdown(self) -> str:
        return self.text


class EmbeddingParameters(Parameters):
    """Adapter `embedding`."""

    input: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="shorter vectors; refused where the model was not trained for it"
    )


class EmbeddingResult(BaseModel):
    """Vectors in the order of the input: base64 of float32, little endian, (inputs, dimensions)."""

    dimensions: int
    vectors: str

    def floats(self) -> list[list[float]]:
        """The vectors as lists of length `dimensions`."""
        values = array("f", base64.b64decode(self.vectors))
        if sys.byteorder == "big":
            values.byteswap()
        flat, width = values.tolist(), self.dimensions
        return [flat[start : start + width] for start in range(0, len(flat), width)]


SoundFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechParameters(Parameters):
    """Adapter `speech`. OpenAI's names and meanings. The sound comes in media events, as it is made."""

    input: Annotated[str, Field(min_length=1, max_length=4096)]
    voice: str = Field("", description="as the model names them; empty: its first")
    response_format: SoundFormat = "mp3"
    speed: Annotated[float, Field(ge=0.25, le=4)] = 1.0


class SpeechResult(BaseModel):
    """What was said. `seconds` of sound, at `sample_rate` Hz."""

    content_type: str
    sample_rate: int
    seconds: float


PictureFormat = Literal["png", "webp", "jpeg"]


class CutoutParameters(Parameters):
    """Adapter `cutout`: the picture's subject on a transparent ground. The picture comes in media events."""

    output_format: Literal["png", "webp"] = Field("png", description="both keep transparency")
    mask: bool = Field(False, description="the mask instead of the picture: white where the subject is")


def _as_number(given: Any) -> Any:
    """A form's text as a number; `Literal` does not read it."""
    return int(given) if isinstance(given, str) and given in ("2", "4") else given


class UpscaleParameters(Parameters):
    """Adapter `upscale`: a larger picture of the same. It comes in media events."""

    scale: Annotated[Literal[2, 4], BeforeValidator(_as_number)] = Field(
        4, description="how many times as wide and as high"
    )
    output_format: PictureFormat = Field("png", description="jpeg has no transparency")


class PictureResult(BaseModel):
    """A picture that was made; pixels."""

    content_type: str
    width: int
    height: int


class ReadingParameters(Parameters):
    """Adapter `reading`: the text of a document, page by page."""

    name: str = Field("", description="the file's name; it tells Markdown from text")


class Page(BaseModel):
    """A page of a document, counted from 1; what has no pages is one page."""

    number: int
    text: str


class ReadingResult(BaseModel):
    """What a document says. Pages without text are listed, too."""

    content_type: str
    pages: list[Page]
