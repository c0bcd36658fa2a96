"""/v1/indexes: collections of documents that can be searched."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1/indexes", tags=["indexes"])
