"""Retrieve: the passages of an index that are nearest to a question."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks.vectors import Hit, IndexName
from tasks.vectors import get_index, search

Question = Annotated[str, Field(min_length=1, max_length=8192)]
Score = Annotated[float, Field(ge=-1, le=1)]


class Query(BaseModel):
    """What to look for in an index."""

    model_config = ConfigDict(extra="forbid")

    query: Question
    top_k: Annotated[int, Field(ge=1, le=100)] = 5
    min_score: Score | None = Field(None, description="cosine that a passage must reach, -1 to 1")


class RetrieveRequest(Query):
    """A question to an index."""

    index: IndexName


class Retrieval(BaseModel):
    """What was found, best first."""

    hits: list[Hit]


@flow(name="retrieve")
async def retrieve(request: RetrieveRequest) -> Retrieval:
    hits = await search(await get_index(request.index), request.query, request.top_k)
    least = -1.0 if request.min_score is None else request.min_score
    return Retrieval(hits=[hit for hit in hits if hit.score >= least])
