"""/docs: Swagger UI as a package brings it, so that the page works offline and asks no other host."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, Response

SCRIPT, STYLE, START = "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/start.js"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
# Its links are relative: a proxy may have the API below a path of its own.
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>SMI</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href=".{STYLE}">
</head>
<body>
<div id="swagger-ui"></div>
<script src=".{SCRIPT}"></script>
<script src=".{START}"></script>
</body>
</html>
"""
# Without `validatorUrl: null` it sends the schema's address to swagger.io.
STARTED = """SwaggerUIBundle({
  url: "./openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""

router = APIRouter(include_in_schema=False)
_files = Path(str(resources.files("fastapi_offline"))) / "static"


@router.get("/docs")
async def page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY})


@router.get(START)
async def start() -> Response:
    return Response(STARTED, media_type="text/javascript")


@router.get(SCRIPT)
async def script() -> FileResponse:
    return FileResponse(_files / "swagger-ui-bundle.js")


@router.get(STYLE)
async def style() -> FileResponse:
    return FileResponse(_files / "swagger-ui.css")
