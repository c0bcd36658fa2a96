"""The tree of errors maps once to HTTP, to gRPC and to the wire."""

import grpc
import pytest

from blocks.errors import _BY_CODE, SmiError, from_code


def kinds(kind: type[SmiError] = SmiError) -> list[type[SmiError]]:
    """The tree's own kinds; what a process adds for itself does not travel."""
    children = [child for child in kind.__subclasses__() if child.__module__ == SmiError.__module__]
    return [kind, *(leaf for child in children for leaf in kinds(child))]


@pytest.mark.parametrize("kind", kinds())
def test_each_kind_survives_the_wire(kind: type[SmiError]) -> None:
    again = from_code(kind.code, "text", param="model", retry_after=2.0)
    assert type(again) is kind
    assert (again.message, again.param, again.retry_after) == ("text", "model", 2.0)


def test_what_another_system_said_is_for_the_user_only() -> None:
    error = from_code("invalid_value", "the engine refuses", detail="you said X")
    assert error.whole == "the engine refuses: you said X"
    assert "you said X" not in f"{error} {error.message} {error!r}"


def test_texts_can_be_stored_and_sent() -> None:
    error = SmiError("a\0b", param="\ud800", detail="\udfff\0")
    for text in (error.message, error.param, error.detail):
        assert text is not None
        assert "\0" not in text
        text.encode()


def test_codes_are_unique_and_statuses_real() -> None:
    assert len(_BY_CODE) == len(kinds())
    for kind in kinds():
        assert 400 <= kind.status < 600
        assert kind.grpc_status in grpc.StatusCode.__members__


def test_an_unknown_code_is_a_plain_error() -> None:
    assert type(from_code("from_the_future", "text")) is SmiError
