"""/docs in a browser, which has no other host to ask and obeys the page's policy."""

from __future__ import annotations

import json
from typing import Any


async def test_the_page_shows_the_endpoints(smi: Any, tab: Any) -> None:
    await tab.open(f"{smi.url}/docs")
    await tab.text_with("/v1/chat/completions", "/v1/pipelines", "Authorize")
    asked = (
        "JSON.stringify(performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin))"
    )
    assert set(json.loads(await tab.script(asked))) == {smi.url}
