"""Ask: a question is answered from the documents of an index, with citations, or not at all.

Whether there is an answer, and what is cited, is decided by scores and never by the model's words.
"""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks.catalogue import Model
from blocks.errors import ContextLengthExceeded
from blocks.vectors import Hit, IndexName
from flows.retrieve import Question, Score
from tasks.fleet import current_fleet
from tasks.live import emit
from tasks.protocol.shapes import ChatParameters, ChatTemperature, MaxTokens, Seed
from tasks.sources import Citation, citations, fitting, prompt, relevant
from tasks.text import Completion, TextDelta, generate
from tasks.vectors import get_index, search

# Measured with MiniLM on tests/data/documents: 22 questions that they answer score 0.45 and more, 12 others
# 0.30 at most (tests/api/test_indexes.py).
MIN_SCORE = 0.37
ABSTENTION = "The documents do not answer this question."


class Asked(BaseModel):
    """A question, for a chat model by name or alias; empty means the catalogue's first."""

    model_config = ConfigDict(extra="forbid")

    question: Question
    model: str = ""
    top_k: Annotated[int, Field(ge=1, le=50)] = 4
    min_score: Score = Field(
        MIN_SCORE, description="cosine that the best passage must reach; below it there is no answer"
    )
    max_tokens: MaxTokens = 256
    temperature: ChatTemperature | None = None
    seed: Seed | None = None


class AskRequest(Asked):
    """A question to an index."""

    index: IndexName


class Answer(BaseModel):
    """What the documents say. If `abstained`, they say nothing of the matter, and no model was asked."""

    text: str
    citations: list[Citation]
    abstained: bool

    def markdown(self) -> str:
        cited = [
            f"{one.number}. **{one.name}**, page {one.page} (score {one.score:.2f})\n\n{_quoted(one.quote)}"
            for one in self.citations
        ]
        return "\n\n".join([self.text, *cited])


def _quoted(text: str) -> str:
    return "\n".join(f"   > {line}" for line in text.splitlines())


@flow(name="ask")
async def ask(request: AskRequest) -> Answer:
    model = await _chat_model(request.model)
    index = await get_index(request.index)
    hits = relevant(await search(index, request.question, request.top_k), request.min_score)
    if not hits:
        await emit(TextDelta(text=ABSTENTION))
        return Answer(text=ABSTENTION, citations=[], abstained=True)
    answer, given = await _answered(request, model, hits)
    return Answer(text=answer.text.strip(), citations=citations(given), abstained=False)


async def _chat_model(name: str) -> Model:
    catalogue = (await current_fleet()).catalogue
    return catalogue.get(name, "chat") if name else catalogue.default("chat")


async def _answered(request: AskRequest, model: Model, hits: list[Hit]) -> tuple[Completion, list[Hit]]:
    """The model's answer, and the hits that it was given: as many as fit its context."""
    given = fitting(hits, request.question, model.context, request.max_tokens)
    while True:
        try:
            parameters = ChatParameters(
                messages=prompt(request.question, given),
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
            )
            return await generate(model.name, parameters), given
        except ContextLengthExceeded:
            if len(given) == 1:
                raise
            given = given[:-1]  # its tokens were shorter than was reckoned
