"""OpenAI parameters that are not honoured here: neutral values pass, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from blocks.errors import UnknownParameter, UnsupportedParameter
from blocks.validation import nearest, shortened

Neutral = Callable[[Any], bool]


def among(*values: Any) -> Neutral:
    return lambda value: value is None or value in values


def anything(value: Any) -> bool:
    return True


CHAT: Mapping[str, Neutral] = {
    "audio": among(),
    "frequency_penalty": among(0),
    "function_call": among("none", "auto"),
    "functions": among([]),
    "logit_bias": among({}),
    "logprobs": among(False),
    "modalities": among(["text"]),
    "moderation": among(),
    "parallel_tool_calls": anything,
    "prediction": among(),
    "presence_penalty": among(0),
    "prompt_cache_key": anything,
    "prompt_cache_retention": anything,
    "reasoning_effort": among(),
    "response_format": among({"type": "text"}),
    "safety_identifier": anything,
    "service_tier": among("auto", "default"),
    "store": among(False),
    "tool_choice": among("none", "auto"),
    "tools": among([]),
    "top_logprobs": among(0),
    "verbosity": among("medium"),
    "web_search_options": among(),
}

# What an assistant's answer carries when a client sends it back.
MESSAGE: Mapping[str, Neutral] = {
    "annotations": among([]),
    "audio": among(),
    "function_call": among(),
    "refusal": among(),
    "tool_calls": among([]),
}

SPEECH: Mapping[str, Neutral] = {
    "instructions": among(""),
}

EMBEDDINGS: Mapping[str, Neutral] = {}

# Of OpenAI's edits of pictures.
IMAGES: Mapping[str, Neutral] = {
    "background": among("auto"),
    "input_fidelity": among(),
    "mask": among(),
    "n": among("1"),
    "output_compression": among(),
    "partial_images": among("0"),
    "prompt": among(""),
    "quality": among("auto"),
    "size": among("auto"),
    "stream": among("false", "False"),
    "user": anything,
}

TRANSCRIPTION: Mapping[str, Neutral] = {
    "chunking_strategy": among("auto"),
    "include[]": among(),
    "known_speaker_names[]": among(),
    "known_speaker_references[]": among(),
    "stream": among("false", "False"),
    "timestamp_granularities[]": among(),
}


def refuse_others(
    extra: Mapping[str, Any] | None, neutral: Mapping[str, Neutral], known: Iterable[str], at: str = ""
) -> None:
    """Check parameters that the request's model does not have.

    Raises:
        UnsupportedParameter: one asks for what we cannot do.
        UnknownParameter: there is no such parameter; the message names one that is spelt alike.
    """
    for name, value in (extra or {}).items():
        param = f"{at}{shortened(name)}"
        passes = neutral.get(name)
        if passes is None:
            hint = nearest(name, [*known, *neutral]) or "leave it out"
            raise UnknownParameter(f"{param!r} is not a parameter here; {hint}", param=param)
        if not passes(value):
            raise UnsupportedParameter(
                f"{param!r} cannot be honoured by this server yet; leave it out", param=param
            )
