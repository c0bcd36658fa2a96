"""Headless Chromium on Prefect's UI, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--window-size=1400,1000",
]


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])

    async def script(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def text_with(self, *wanted: str, timeout_s: float = 40) -> str:
        """The page's text once it holds all of `wanted`; what it holds by then is in the error."""
        text = ""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(word in text for word in wanted):
                    await asyncio.sleep(0.3)
                    text = await self.script("document.body ? document.body.innerText : ''") or ""
        except TimeoutError:
            raise AssertionError(f"no {wanted} on the page, which says: {text[:2000]}") from None
        return text

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "install chromium (Debian: apt-get install chromium)"
    folder = tempfile.mkdtemp(prefix="smi-chromium-")
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        env={**os.environ, "HOME": folder, "TMPDIR": folder},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(Path(folder) / "DevToolsActivePort")
        async with httpx.AsyncClient(trust_env=False) as http:
            tabs = (await http.get(f"http://127.0.0.1:{port}/json")).json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with connect(address, max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _port(file: Path) -> int:
    async with asyncio.timeout(30):
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.1)
    return int(file.read_text().splitlines()[0])


@pytest.fixture
async def tab() -> AsyncIterator[Page]:
    async with chromium() as page:
        yield page


@pytest.fixture
async def prefect_ui(smi: Any) -> AsyncIterator[Page]:
    """A tab that has done what Prefect's login form does."""
    async with chromium() as page:
        ui = smi.prefect_url.removesuffix("/api")
        await page.open(ui)
        async with asyncio.timeout(30):
            while await page.script("document.readyState + location.origin") != f"complete{ui}":
                await asyncio.sleep(0.2)
        password = base64.b64encode(smi.prefect_auth.encode()).decode()
        await page.script(f"localStorage.setItem('prefect-password', {json.dumps(password)})")
        yield page
