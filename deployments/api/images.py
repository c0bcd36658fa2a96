"""POST /v1/images/cutouts and /v1/images/upscales."""

from __future__ import annotations

from deployments.api.live import LiveRoute

ROUTES: tuple[LiveRoute, ...] = ()
