"""tasks/vectors.py and tasks/sources.py: what is decided without a service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from blocks.errors import Conflict, ContextLengthExceeded, Unavailable
from blocks.settings import Settings
from blocks.vectors import Chunk, Hit, Index
from tasks.fleet import close_fleet, current_fleet
from tasks.sources import citations, fitting, prompt, relevant
from tasks.vectors import _shorter, check_model, embedding_model, list_indexes


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[None]:
    """The shipped catalogue, with nobody there to serve it."""
    await close_fleet()
    settings = Settings(
        home=tmp_path, join_token="t", prefect_url="http://127.0.0.1:1/api", prefect_auth="a:b"
    )
    await current_fleet(settings)
    yield
    await close_fleet()


def index_of(model: str, source: str) -> Index:
    return Index(name="kb", model=model, source=source, dimensions=384, created=0)


def chunk(text: str) -> Chunk:
    return Chunk(number=0, page=1, start=0, end=len(text), heading="", text=text)


def hit(score: float, text: str = "text") -> Hit:
    return Hit(document="d", name="n.md", page=2, chunk=0, start=0, end=4, heading="", text=text, score=score)


async def test_an_index_of_another_model_is_refused(fleet: None) -> None:
    """Its vectors would be compared with others that mean something else, and nobody would notice."""
    entry = await embedding_model("")
    await check_model(index_of(entry.name, entry.source))
    with pytest.raises(Conflict, match=r"from 'hf:old/one', which the catalogue now takes from 'package:"):
        await check_model(index_of(entry.name, "hf:old/one"))
    with pytest.raises(Conflict, match=r"which the catalogue now does not have; make a new index"):
        await check_model(index_of("gone", "hf:old/one"))


async def test_a_service_that_is_not_there_is_unavailable(fleet: None) -> None:
    with pytest.raises(Unavailable, match="`smi vectors`") as away:
        await list_indexes()
    assert away.value.retry_after


def test_all_chunks_as_long_as_the_one_that_was_too_long_are_split() -> None:
    batch = [chunk("short"), chunk("long " * 100), chunk("longer " * 100), chunk("漢字" * 60)]
    error = ContextLengthExceeded("too long", param="input[3]")
    shorter = _shorter(batch, error)
    assert [len(piece.text) for piece in shorter] == [5, 249, 249, 349, 349, 60, 60]
    with pytest.raises(ContextLengthExceeded):
        _shorter([chunk("x")], ContextLengthExceeded("too long", param="input[0]"))


def test_what_is_relevant_is_decided_by_scores() -> None:
    assert relevant([], 0.3) == []
    assert relevant([hit(0.29)], 0.3) == []
    assert [one.score for one in relevant([hit(0.8), hit(0.61), hit(0.5)], 0.3)] == [0.8, 0.61]
    assert [one.score for one in relevant([hit(0.36), hit(0.31), hit(0.28)], 0.3)] == [0.36, 0.31]


def test_hits_fit_the_context_best_first_and_citations_are_those_in_the_prompt() -> None:
    hits = [hit(0.9 - 0.01 * number, f"fact {number} " * 100) for number in range(10)]
    given = fitting(hits, "why?", 2048, 256)
    assert 0 < len(given) < 10
    assert given == hits[: len(given)]
    asked = prompt("why?", given)[-1].content
    assert len(asked) <= (2048 - 256) * 3
    assert [one.number for one in citations(given)] == list(range(1, len(given) + 1))
    assert asked.count("</source>") == len(given)
    assert fitting(hits, "why?", 64, 256) == hits[:1]
    assert fitting(hits, "why?", None, 256) == hits
