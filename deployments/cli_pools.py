"""`smi pools`: the classes of machines that there are."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli import Home, Json, app, note, settings_of, table, told

if TYPE_CHECKING:
    from blocks.settings import Settings

ANSWER_S = 3.0  # nodes that have not said what is free within this are shown without

pools = typer.Typer(help="List pools, the classes of machines by GPU memory, or add one.")
app.add_typer(pools, name="pools")


@pools.callback(invoke_without_command=True)
def list_all(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """List the pools: GPU memory, queues, nodes online and what models may still take there."""
    context.obj = home
    if context.invoked_subcommand is not None:
        return
    with told():
        entries = asyncio.run(_listed(settings_of(home)))
    if as_json:
        typer.echo(json.dumps(entries))
        return
    rows = []
    for entry in entries:
        memory = f"{entry['gpu_memory_gb']} GB" if entry["gpu_memory_gb"] else "-"
        queues = " ".join(f"{name}:{priority}" for name, priority in entry["queues"].items())
        online = ", ".join(_node(node) for node in entry["nodes"]) or "no node"
        rows.append((entry["name"], memory, queues, online))
    table(("pool", "GPU memory", "queues:priority", "nodes (free memory)"), *rows)


@pools.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="As gpu-48gb: a-z, 0-9 and '-'.")],
    gpu_memory_gb: Annotated[int, typer.Option(min=0, help="GPU memory of its nodes; 0: none.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a pool with its queues high, normal and low; `smi node --pool NAME` joins it."""
    from deployments.pools import QUEUES, add_pool

    home = home or context.obj
    with told():
        is_new = asyncio.run(add_pool(settings_of(home), name, gpu_memory_gb))
    if as_json:
        typer.echo(
            json.dumps({"name": name, "gpu_memory_gb": gpu_memory_gb, "queues": QUEUES, "new": is_new})
        )
    else:
        what = "is there" if is_new else "exists already"
        note(f"pool {name} {what}; on a machine of it: smi node --pool {name} --memory ...")


def _node(node: dict[str, Any]) -> str:
    free = node["memory_free"]
    return node["name"] if free is None else f"{node['name']} ({free / 2**30:.1f} GiB)"


async def _listed(settings: Settings) -> list[dict[str, Any]]:
    """The pools; of each node its name and the bytes that models may still take, None if it does not say."""
    from deployments.pools import list_pools

    found = await list_pools(settings)
    names = {node for pool in found for node in pool.nodes}
    free = await _free(settings, names) if names else {}
    return [
        asdict(pool) | {"nodes": [{"name": node, "memory_free": free.get(node)} for node in pool.nodes]}
        for pool in found
    ]


async def _free(settings: Settings, names: set[str]) -> dict[str, int]:
    """Bytes free for models, as the nodes themselves say it."""
    import contextlib

    from tasks.fleet import Fleet

    fleet = Fleet(settings)
    await fleet.start()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not names <= fleet.nodes.keys():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        return {node.name: node.memory_free for node in fleet.nodes.values()}
    finally:
        await fleet.stop()
