"""/docs and /openapi.json."""

from __future__ import annotations

import re
from typing import Any

import httpx

from flows.registry import STEPS


async def test_the_page_needs_no_other_host(smi: Any) -> None:
    async with httpx.AsyncClient(base_url=smi.url, trust_env=False) as anyone:
        page = await anyone.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
        assert "//" not in page.text
        links = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
        assert len(links) == 3
        for link in links:
            answer = await anyone.get(f"/{link}")
            kind = "text/css" if link.endswith(".css") else "text/javascript"
            assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, kind)
        start = (await anyone.get("/docs/start.js")).text
        assert "//" not in start
        assert "validatorUrl: null" in start


async def test_a_pipeline_is_described(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    content = schema["paths"]["/v1/pipelines"]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    kinds = schema["components"]["schemas"]
    asked = kinds[name]["properties"]
    assert {"$ref": "#/components/schemas/Pipeline"} in asked["pipeline"]["anyOf"]
    assert asked.keys() == {"pipeline", "inputs", "priority"}
    assert kinds["StepDefinition"]["properties"]["task"]["enum"] == list(STEPS)
