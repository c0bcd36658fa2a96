"""The home folder of an installation: its folders, its secrets, its ports."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from blocks.errors import ConfigurationError
from blocks.settings import Settings, load_settings
from deployments.up import postgres, processes

PORTS = ("api_port", "node_port", "prefect_port")
SOCKET_PATH_MAX = 100  # the kernel's limit is 107 bytes


def prepare(home: Path) -> None:
    """Make the home folder and what lies in it, private."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("logs", "storage", "prefect", "vectors"):
            (home / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"home {home} cannot be used ({error.strerror}): choose another with --home"
        ) from error


def settled(home: Path, ports: dict[str, int | None]) -> Settings:
    """Settings with secrets made, ports chosen and checked to be free, written to settings.json.

    A port that was chosen because 0 was asked for is kept as long as nobody else has it.

    Raises:
        ConfigurationError: naming who has a port that was asked for.
    """
    settings = load_settings(home=home, **ports)
    file = home / "settings.json"
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    any_free = {name for name in values.get("any_free", []) if ports.get(name) is None}
    taken: set[int] = set()
    for name in PORTS:
        port = getattr(settings, name)
        any_free |= {name} if port == 0 else set()
        port = port or values.get(name, 0)
        if port == 0 or (name in any_free and not processes.is_free(settings.host, port)):
            port = _free(settings.host, taken)
        elif not processes.is_free(settings.host, port):
            option = {"api_port": "--port"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigurationError(
                f"port {port} ({name}) is taken by {processes.holder(port)}; "
                f"stop it, or choose another port with {option} (0: any free one)"
            )
        taken.add(port)
        values[name] = port
    values |= {
        "any_free": sorted(any_free),
        "prefect_auth": _secret(settings.prefect_auth) or f"smi:{secrets.token_urlsafe(18)}",
        "join_token": _secret(settings.join_token) or secrets.token_urlsafe(32),
        "prefect_url": f"http://{settings.host}:{values['prefect_port']}/api",
        "database_url": postgres.url(home / "postgres", "smi"),
        "vectors_url": _vectors_url(settings, values.get("vectors_url")),
    }
    processes.write_private(file, json.dumps(values, indent=2))
    return load_settings(home=home, **{name: value for name, value in values.items() if name != "any_free"})


def _free(host: str, taken: set[int]) -> int:
    while (port := processes.free_port(host)) in taken:
        pass
    return port


def _vectors_url(settings: Settings, before: str | None) -> str:
    """The socket of the vectors service: in the home folder, or in a private one if its path is too long."""
    if settings.vectors_url is not None and settings.vectors_url != before:
        return settings.vectors_url
    socket = settings.home / "vectors" / "service.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_MAX:
        return f"unix:{socket}"
    if before is not None and _private(Path(before.removeprefix("unix:")).parent):
        return before
    return f"unix:{tempfile.mkdtemp(prefix='smi-')}/service.sock"


def _private(folder: Path) -> bool:
    return folder.is_dir() and folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value else None


def environment(settings: Settings) -> dict[str, str]:
    """What every child gets. An embedded installation takes no other Prefect's settings over."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") or name.startswith("PREFECT_LOGGING_")
    }
    auth = settings.require("prefect_auth")
    return kept | {
        "SMI_HOME": str(settings.home),
        "SMI_HOST": settings.host,
        "SMI_API_PORT": str(settings.api_port),
        "SMI_NODE_PORT": str(settings.node_port),
        "SMI_PREFECT_PORT": str(settings.prefect_port),
        "SMI_PREFECT_URL": settings.require("prefect_url"),
        "SMI_PREFECT_AUTH": auth,
        "SMI_JOIN_TOKEN": settings.require("join_token"),
        "SMI_DATABASE_URL": settings.require("database_url"),
        "SMI_VECTORS_URL": settings.vectors,
        "PREFECT_HOME": str(settings.home / "prefect"),
        "PREFECT_API_URL": settings.require("prefect_url"),
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "0.5",
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
    }
