"""deployments/node/ledger.py"""

from __future__ import annotations

import psutil
import pytest

from blocks.errors import OutOfMemory
from deployments.node.ledger import Ledger, default_memory

GIB = 2**30


def test_reservations_never_exceed_the_total() -> None:
    ledger = Ledger(10)
    assert ledger.reserve("a", 6)
    assert not ledger.reserve("b", 5)
    assert ledger.reserve("b", 4)
    assert (ledger.reserved, ledger.free) == (10, 0)
    ledger.release("a")
    ledger.release("a")
    assert ledger.free == 6


def test_a_second_reservation_of_one_model_is_a_bug() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", 1)
    with pytest.raises(ValueError, match="already"):
        ledger.reserve("a", 1)


def test_victims_are_as_few_as_needed_in_the_order_given() -> None:
    ledger = Ledger(10)
    for name, size in (("a", 2), ("b", 3), ("c", 4)):
        ledger.reserve(name, size)
    assert ledger.victims("new", 1, ["b", "a"]) == []
    assert ledger.victims("new", 4, ["b", "a"]) == ["b"]
    assert ledger.victims("new", 5, ["b", "a"]) == ["b", "a"]


def test_out_of_memory_names_need_free_and_what_is_loaded() -> None:
    ledger = Ledger(4 * GIB)
    ledger.reserve("llm", 3 * GIB)
    with pytest.raises(OutOfMemory) as told:
        ledger.victims("whisper", 2 * GIB, [])
    assert told.value.message == (
        "whisper needs 2.00 GiB; 1.00 GiB of 4.00 GiB are free and loaded are llm (3.00 GiB); "
        "nothing more is idle"
    )
    assert told.value.retry_after == 5
    with pytest.raises(OutOfMemory) as never:
        ledger.victims("huge", 5 * GIB, ["llm"])
    assert never.value.retry_after is None


def test_default_is_four_fifths_of_what_there_is() -> None:
    assert 0 < default_memory() <= 0.8 * psutil.virtual_memory().total
