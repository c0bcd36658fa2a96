"""The API's process."""

from __future__ import annotations

import uvicorn

from blocks.settings import Settings
from deployments.api.app import create_app
from deployments.api.protocol import BoundedProtocol

GRACE_S = 3  # how long answers may go on after a stop was asked for


async def serve_api(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Run it with `uvloop.run`.

    Raises:
        ConfigurationError: a setting is missing.
    """
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.api_port,
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    await uvicorn.Server(config).serve()
