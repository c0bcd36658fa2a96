"""GET /v1/models."""

from __future__ import annotations

import time

from fastapi import APIRouter
from pydantic import BaseModel

from blocks.catalogue import Model
from tasks.fleet import current_fleet

router = APIRouter(prefix="/v1/models", tags=["models"])
_CREATED = int(time.time())


class ModelCard(BaseModel):
    """OpenAI's model object, and what it is for."""

    id: str
    object: str = "model"
    created: int = _CREATED
    owned_by: str
    task: str
    aliases: list[str]
    context: int | None
    licence: str


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


def _card(model: Model) -> ModelCard:
    return ModelCard(
        id=model.name,
        owned_by=model.owned_by,
        task=model.task,
        aliases=list(model.aliases),
        context=model.context,
        licence=model.licence,
    )


@router.get("", summary="The models there are")
async def list_models() -> ModelList:
    return ModelList(data=[_card(model) for model in (await current_fleet()).catalogue])


@router.get("/{name:path}", summary="One model, by name or alias")
async def get_model(name: str) -> ModelCard:
    return _card((await current_fleet()).catalogue.get(name))
