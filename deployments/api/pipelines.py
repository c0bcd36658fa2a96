"""POST /v1/pipelines: a job of several steps."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/pipelines", tags=["pipelines"])
