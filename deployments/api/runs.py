"""/v1/runs: what runs that Prefect's UI or a schedule started have left, by signed link."""

from __future__ import annotations

import asyncio
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from blocks.errors import PermissionDenied
from deployments.api.files import file_response
from deployments.jobs.stored import OfNoJob
from tasks.fleet import current_fleet


def _by_link(request: Request) -> None:
    if request.state.key is not None:
        raise PermissionDenied("a run belongs to no key: its page in Prefect has links that open")


router = APIRouter(prefix="/v1/runs", tags=["jobs"], dependencies=[Depends(_by_link)])
RunId = Annotated[UUID, "a flow run's id"]


@router.get("/{run_id}/result", summary="What a run without a job returned", response_model=None)
async def get_result(run_id: RunId) -> Response:
    storage = (await current_fleet()).storage
    stored = await asyncio.to_thread(storage.read_shared, OfNoJob(str(run_id)).result)
    return Response(stored, media_type="application/json")


@router.get(
    "/{run_id}/files/{name:path}", summary="A file that a run without a job made", response_model=None
)
async def get_file(request: Request, run_id: RunId, name: str) -> Response:
    return await file_response(request, (await current_fleet()).storage, OfNoJob(str(run_id)), name)
