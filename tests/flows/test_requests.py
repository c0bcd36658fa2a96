"""The requests of flows are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from blocks.storage import Media
from flows.converse import ConverseRequest
from flows.registry import FLOWS
from tasks.protocol.shapes import ChatParameters


@pytest.mark.parametrize(
    "field", [{"max_tokens": 2**40}, {"max_tokens": 0}, {"seed": 2**70}, {"temperature": 2.1}]
)
def test_what_a_later_step_would_refuse_is_refused_at_once(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ConverseRequest(file=Media(reference="clip"), **field)
    with pytest.raises(ValidationError):
        ChatParameters.model_validate({"messages": [{"role": "user", "content": "x"}], **field})


def test_each_flow_has_a_request_of_its_own() -> None:
    for name, entry in FLOWS.items():
        assert entry.flow.name == name
        assert entry.flow.parameters.required == ["request"]
        assert entry.request.model_config["extra"] == "forbid"
