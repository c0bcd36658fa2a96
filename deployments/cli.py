"""`smi`: every command of SMI. Commands import what they need themselves, so that `smi --help` is quick."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from blocks.settings import Settings

app = typer.Typer(
    name="smi",
    help="One OpenAI-compatible endpoint and one job API over your own machines, run as Prefect flows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Home = Annotated[
    Path | None,
    typer.Option(help="The installation's folder [default: ~/.smi; as root /var/lib/smi]", envvar="SMI_HOME"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free one")]
Key = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key", show_envvar=True)]


def home_of(home: Path | None) -> Path:
    """The home folder meant, absolute."""
    from blocks.settings import default_home

    return (home or default_home()).expanduser().resolve()


def settings_of(home: Path | None, **overrides: Any) -> Settings:
    """This process's settings."""
    from blocks.settings import load_settings

    return load_settings(home=home_of(home), **overrides)


def nothing_runs(home: Path | None) -> str:
    """Said where there is nothing to stop or to show."""
    return f"nothing is running in {home_of(home)}; --home or SMI_HOME names another folder"


def columns(*rows: tuple[str, ...]) -> Iterator[str]:
    """Rows as lines of columns, each as wide as what it holds."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def table(*rows: tuple[str, ...]) -> None:
    """Print rows, the first of them the headings."""
    for line in columns(*rows):
        typer.echo(line)


def note(text: str) -> None:
    """A line for whoever watches; scripts read stdout."""
    typer.echo(text, err=True)


@contextmanager
def told() -> Iterator[None]:
    """An error that is meant for the user becomes one line on stderr and exit code 1."""
    from blocks.errors import SmiError

    try:
        yield
    except SmiError as error:
        typer.secho(f"smi: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def serve(service: Coroutine[Any, Any, None]) -> None:
    """Run a service to its end, its log on stderr."""
    import logging

    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    uvloop.run(service)


@app.command()
def up(
    home: Home = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The API's port; 0: any free")] = None,
    node_port: Port = None,
    prefect_port: Port = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Make and show another API key.")] = False,
    as_json: Json = False,
) -> None:
    """Start everything on this machine; Ctrl-C stops it."""
    from deployments.up.installation import Wishes
    from deployments.up.installation import up as run

    ports = {"api_port": port, "node_port": node_port, "prefect_port": prefect_port}
    with told():
        run(Wishes(home_of(home), ports, new_key, as_json), note, typer.echo)


@app.command()
def down(home: Home = None) -> None:
    """Stop the installation that `smi up` runs."""
    from deployments.up import installation

    with told():
        stopped = installation.down(home_of(home))
    note(f"stopped: {', '.join(stopped)}" if stopped else nothing_runs(home))


@app.command()
def status(home: Home = None, as_json: Json = False) -> None:
    """Show each process, its port and its health.

    healthy: it answers. running: its process runs, and has nothing to ask at. Exit code 3: not all is well.
    """
    from dataclasses import asdict

    from deployments.up import installation

    with told():
        entries = asyncio.run(installation.status(home_of(home)))
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries]))
    elif not entries:
        note(nothing_runs(home))
    else:
        rows = [(entry.name, str(entry.pid), str(entry.port or "-"), entry.state) for entry in entries]
        table(("process", "pid", "port", "state"), *rows)
    if not entries or any(entry.state in ("not running", "does not answer") for entry in entries):
        raise typer.Exit(3)


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="api, jobs, node, vectors, prefect, ...")] = None,
    home: Home = None,
    lines: Annotated[int, typer.Option("-n", min=0, help="How many of the last lines.")] = 40,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines come.")] = False,
) -> None:
    """Show what the processes have logged."""
    from deployments.up.logs import show

    with told():
        show(home_of(home) / "logs", name, lines, follow, typer.echo)


@app.command()
def env(home: Home = None) -> None:
    """Print what a flow of your own needs to reach this installation: eval "$(smi env)"."""
    import shlex

    with told():
        settings = settings_of(home)
        variables = {
            "SMI_HOME": str(settings.home),
            "PREFECT_API_URL": settings.require("prefect_url"),
            "PREFECT_API_AUTH_STRING": settings.require("prefect_auth"),
            "OPENAI_BASE_URL": f"http://{settings.host}:{settings.api_port}/v1",
        }
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def node(
    home: Home = None,
    pool: Annotated[str, typer.Option(help="The pool that this machine belongs to.")] = "cpu",
    port: Port = None,
    memory: Annotated[
        str | None, typer.Option(help="What models may take, as 8GiB; default: measured")
    ] = None,
    worker: Annotated[bool, typer.Option(help="Run flows here too.")] = True,
) -> None:
    """Serve models on this machine."""
    from deployments.node.main import serve_node

    with told():
        serve(serve_node(settings_of(home), pool=pool, port=port, memory=_size(memory), worker=worker))


@app.command()
def api(home: Home = None, port: Port = None) -> None:
    """Serve the HTTP API."""
    from deployments.api.main import serve_api

    with told():
        serve(serve_api(settings_of(home, api_port=port)))


@app.command()
def jobs(home: Home = None) -> None:
    """Process jobs."""
    from deployments.jobs.processor import serve_jobs

    with told():
        serve(serve_jobs(settings_of(home)))


@app.command()
def vectors(home: Home = None) -> None:
    """Serve indexes of documents, from Milvus Lite or a Milvus server."""
    from deployments.vectors.main import serve_vectors

    with told():
        serve(serve_vectors(settings_of(home)))


def _size(text: str | None) -> int | None:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from blocks.errors import ConfigurationError

    try:
        return None if text is None else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ConfigurationError(f"--memory {text!r} is not a size: write 8GiB or 512MiB") from error


def main() -> None:
    """Entry point."""
    import deployments.cli_flows
    import deployments.cli_pools
    import deployments.cli_requests
    import deployments.cli_run  # noqa: F401  (these add their commands)

    app()
