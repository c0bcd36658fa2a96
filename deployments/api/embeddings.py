"""POST /v1/embeddings."""

from __future__ import annotations

from deployments.api.live import LiveRoute

ROUTES: tuple[LiveRoute, ...] = ()
