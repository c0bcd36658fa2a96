"""POST /v1/audio/speech."""

from __future__ import annotations

from deployments.api.live import LiveRoute

ROUTES: tuple[LiveRoute, ...] = ()
