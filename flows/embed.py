"""Embed: turn texts into vectors."""

from __future__ import annotations

from prefect import flow

from tasks.protocol.shapes import EmbeddingParameters
from tasks.text import Embeddings
from tasks.text import embed as embedded


class EmbedRequest(EmbeddingParameters):
    """Texts for a model, by its name or alias in the catalogue; empty means the first of its kind."""

    model: str = ""


@flow(name="embed")
async def embed(request: EmbedRequest) -> Embeddings:
    return await embedded(request.model, request)
