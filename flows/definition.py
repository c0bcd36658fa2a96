"""A pipeline as one writes it: inputs, and steps whose parameters refer to inputs and to other steps.

    name: spoken-question
    inputs:
      question: {type: recording}
    steps:
      transcribe: {task: transcribe, parameters: {file: $inputs.question}}
      answer:
        task: chat
        parameters:
          messages: [{role: user, content: "Answer briefly: ${transcribe.text}"}]

Kept apart from the flow, so that the command line need not import Prefect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from blocks.storage import Document, Media, Picture, Recording
from tasks.job import Priority

MAX_STEPS = 100
MAX_INPUTS = 30
MAX_VALUE = 100_000  # characters of an input
MAX_REFERENCES = 1000
FILES: dict[str, type[Media]] = {"recording": Recording, "picture": Picture, "document": Document}
VALUES: dict[str, type[Any]] = {"string": str, "number": float, "integer": int, "boolean": bool}


class Input(BaseModel):
    """What a pipeline is given when it is handed in: a file, or a value that may have a default."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["recording", "picture", "document", "string", "number", "integer", "boolean"]
    default: str | bool | int | float | None = None
    description: str = ""


class StepDefinition(BaseModel):
    """One step.

    Attributes:
        task: a flow by name: chat, transcribe, ...
        model: name or alias in the catalogue; None is the first of its kind.
        priority: None is the pipeline's own.
        parameters: the flow's request without `model`; texts may refer to inputs and results.
        after: steps that must have succeeded first, besides those that `parameters` refers to.
    """

    model_config = ConfigDict(extra="forbid")

    task: str
    model: Annotated[str, Field(min_length=1)] | None = None
    priority: Priority | None = None
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    after: list[str] = Field(default_factory=list)


class Pipeline(BaseModel):
    """Steps by name. `flows.plan` says whether it can be run."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]{0,99}$")]
    inputs: dict[str, Input] = Field(default_factory=dict)
    steps: dict[str, StepDefinition]
