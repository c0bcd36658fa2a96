"""Fixtures that every test may use. `smi` is one real installation for the whole session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from deployments.up.installation import DOWN_S

MODELS = """
[echo-slow]
task = "chat"
driver = "echo"
memory = "64MiB"
context = 8192
slots = 64
queue = 256
options = { tokens_per_second = 20 }

[echo-paced]
task = "chat"
driver = "echo"
memory = "64MiB"
context = 8192
slots = 64
options = { tokens_per_second = 50 }

[echo-single]
task = "chat"
driver = "echo"
memory = "64MiB"
slots = 1
options = { tokens_per_second = 20 }

[echo-narrow]
task = "chat"
driver = "echo"
memory = "64MiB"
slots = 1
queue = 1
options = { tokens_per_second = 20 }

[echo-elsewhere]
task = "chat"
driver = "echo"
memory = "100TiB"

[outside]
task = "chat"
driver = "openai"
source = "https://api.openai.invalid/v1"
tier = "cloud"

[echo-outside]
task = "chat"
driver = "echo"
memory = "64MiB"
tier = "cloud"

[echo-crash]
task = "chat"
driver = "echo"
memory = "64MiB"
options = { tokens_per_second = 20, crash_on = "crash" }

[echo-small]
task = "chat"
driver = "echo"
memory = "64MiB"
slots = 8
options = { tokens_per_second = 20 }

[echo-large]
task = "chat"
driver = "echo"
memory = "3GiB"
slots = 8
options = { tokens_per_second = 20 }
"""


@dataclass(frozen=True)
class Installation:
    """A running `smi up`. `url` has no path; `prefect_url` ends in /api; `pids` by process name."""

    url: str
    key: str
    prefect_url: str
    prefect_auth: str
    home: Path
    pids: dict[str, int]
    up: subprocess.Popen[str]

    def processes(self) -> list[psutil.Process]:
        """`smi up`, its children and all that they started."""
        found = []
        for pid in (self.up.pid, *self.pids.values()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(found))

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> list[psutil.Process]:
        """Stop it; the processes that are left, which should be none."""
        before = self.processes()
        self.up.send_signal(sign)
        self.up.wait(DOWN_S)
        assert self.up.stdout is not None
        self.up.stdout.close()
        return [process for process in before if runs(process)]


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(*arguments: str) -> list[str]:
    """`smi` with these arguments."""
    return [sys.executable, "-P", "-m", "deployments", *arguments]


def clean_environment() -> dict[str, str]:
    """This process's environment without what names another installation."""
    foreign = ("SMI_", "PREFECT_", "OPENAI_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def start(home: Path) -> Installation:
    """Run `smi up` in `home` on free ports, with a new key, until it says that it is up."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "models.toml").write_text(MODELS)
    ports = ["--port", "0", "--node-port", "0", "--prefect-port", "0"]
    with (home / "up.stderr").open("w") as stderr:
        up = subprocess.Popen(
            command("up", "--home", str(home), "--json", "--new-key", *ports),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=clean_environment(),
            start_new_session=True,
        )
    assert up.stdout is not None
    line = up.stdout.readline()
    assert line, f"`smi up` ended with {up.wait()}: {(home / 'up.stderr').read_text()}"
    told = json.loads(line) | {"home": home}
    return Installation(up=up, **told)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder under /var/tmp: short enough for sockets, and on a disk. Private, as mkdtemp makes them."""
    path = Path(tempfile.mkdtemp(prefix="smi-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def smi(folder: Path) -> Iterator[Installation]:
    """A running installation: url, key, prefect_url, prefect_auth, home, pids. Nothing of it is left over."""
    running = start(folder / "smi")
    yield running
    assert running.stop() == []


@pytest.fixture
async def http(smi: Installation) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=smi.url, headers={"Authorization": f"Bearer {smi.key}"}, timeout=60, trust_env=False
    ) as client:
        yield client


@pytest.fixture
async def client(smi: Installation) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{smi.url}/v1",
        api_key=smi.key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False, timeout=60),
    ) as client:
        yield client


@pytest.fixture
async def prefect(smi: Installation) -> AsyncIterator[httpx.AsyncClient]:
    user, _, password = smi.prefect_auth.partition(":")
    async with httpx.AsyncClient(
        base_url=smi.prefect_url, auth=(user, password), timeout=60, trust_env=False
    ) as client:
        yield client


@pytest.fixture(scope="session")
def start_smi() -> Callable[[Path], Installation]:
    """Starts another installation in a home folder; whoever starts it stops it."""
    return start


@pytest.fixture(scope="session")
def smi_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `smi` with arguments to its end."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        environment = clean_environment() | dict(options.pop("env", {}))  # type: ignore[call-overload]
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=60, env=environment, **options
        )

    return run


@pytest.fixture
def single_taken(http: httpx.AsyncClient) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Within what it gives, another client has the one slot of model `echo-single`."""

    @asynccontextmanager
    async def taken() -> AsyncIterator[None]:
        body = {"model": "echo-single", "messages": [{"role": "user", "content": "word " * 20_000}]}
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            pieces = answer.aiter_bytes()  # kept: once it is gone, the client has left
            await anext(pieces)
            yield

    return taken
