"""What `smi up` prints once all is up."""

from __future__ import annotations

import shlex
from typing import Any

from blocks.settings import Settings, default_home


def facts(settings: Settings, key: str | None, pids: dict[str, int]) -> dict[str, Any]:
    """The banner for scripts."""
    auth = settings.require("prefect_auth")
    return {
        "url": f"http://{settings.host}:{settings.api_port}",
        "key": key,
        "prefect_url": settings.require("prefect_url"),
        "prefect_auth": auth,
        "home": str(settings.home),
        "pids": pids,
    }


def text(settings: Settings, key: str | None) -> str:
    url = f"http://{settings.host}:{settings.api_port}"
    shown = key or "$OPENAI_API_KEY"
    told = f"{key}   (shown this once)" if key else "as before; lost? `smi up --new-key`"
    exported = f"export OPENAI_API_KEY={key}" if key else "# export OPENAI_API_KEY=<your key>"
    other_home = (
        ""
        if settings.home == default_home().resolve()
        else f"export SMI_HOME={shlex.quote(str(settings.home))}\n  "
    )
    messages = '[{"role": "user", "content": "What is the sea?"}]'
    body = f'{{"model": "smollm2-135m", "max_tokens": 100, "messages": {messages}}}'
    return f"""
SMI is up.  {url}/docs

  API     {url}/v1
  key     {told}
  Prefect {settings.require("prefect_url").removesuffix("/api")}   login: {settings.require("prefect_auth")}
  home    {settings.home}   (logs: `smi logs`)

  {other_home}export OPENAI_BASE_URL={url}/v1
  {exported}
  curl {url}/v1/chat/completions -H "Authorization: Bearer {shown}" \\
    -H 'Content-Type: application/json' -d '{body}'

The embedded chat model has 135 M parameters: it shows that everything works, not what a model can do.
For a 7B model from the hub, or an Ollama or vLLM that you already run, add it to {settings.home}/models.toml
(README.md, "Add to it", has the lines to copy).

Ctrl-C stops everything.
"""
