"""The dispatcher: which node runs a request.

`choose` is a pure function of the fleet; `dispatch` is the step around it; `infer` places a request and
runs it, trying the next node when one that looked right refuses. The node has the last word: it reserves
memory or refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from prefect.runtime import flow_run

from blocks.catalogue import Model
from blocks.errors import (
    ModelNotFound,
    OutOfMemory,
    PayloadTooLarge,
    PermissionDenied,
    SmiError,
    Unavailable,
)
from blocks.storage import Media
from tasks.fleet import Node, Runner, current_fleet
from tasks.job import Priority, current_job, placed, principal, progress
from tasks.live import current, label
from tasks.principal import Policy
from tasks.protocol.client import MAX_MESSAGE, OnEvent
from tasks.protocol.inference_pb2 import HIGH, LOW, NORMAL, Done, Event, Header
from tasks.protocol.shapes import Parameters
from tasks.step import step

Reason = Literal["warm", "loading", "load", "evict", "wait"]
MAX_PARAMETERS = MAX_MESSAGE - 64 * 1024  # bytes; the rest is for the header's other fields
NODE_WAIT_S = 5.0  # how long a request waits for a first node, as after a start
WIRE_PRIORITY = {"high": HIGH, "normal": NORMAL, "low": LOW}


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs of a node. Memory in bytes."""

    model: str
    memory: int
    priority: Priority = "normal"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: the node's name, the gRPC target to call, and why there."""

    node: str
    target: str
    reason: Reason


def choose(nodes: Collection[Node], need: Need, excluded: Collection[str] = ()) -> Placement:
    """The best node for `need`, in this order:

    a warm runner with a free slot; one that is loading the model; room without evicting, on the smallest
    sufficient node; room after evicting idle models; a place in the shortest queue.

    Raises:
        OutOfMemory: the model is larger than every node.
        Unavailable: no node can take it now.
    """
    open_nodes = [node for node in nodes if not node.draining and node.name not in excluded]
    if not open_nodes:
        raise Unavailable(
            "no node is connected that could run this; start one with `smi node`", retry_after=5
        )
    having = [(node, node.runners[need.model]) for node in open_nodes if need.model in node.runners]
    free = [(node, runner) for node, runner in having if runner.ready and runner.active < runner.slots]
    if free:
        node, runner = min(free, key=lambda pair: (pair[1].active / pair[1].slots, pair[0].memory_total))
        return _at(node, "warm", runner)
    for node, runner in having:
        if not runner.ready:
            return _at(node, "loading")
    without = [node for node in open_nodes if need.model not in node.runners]
    roomy = [node for node in without if node.memory_free >= need.memory]
    if roomy:
        return _at(min(roomy, key=lambda node: (node.memory_total, -node.memory_free)), "load")
    evictable = [node for node in without if node.memory_free + _idle_memory(node) >= need.memory]
    if evictable:
        return _at(min(evictable, key=lambda node: node.memory_total), "evict")
    if having:
        node, runner = min(having, key=lambda pair: (pair[1].active + pair[1].queued) / pair[1].slots)
        return _at(node, "wait", runner)
    largest = max(node.memory_total for node in open_nodes)
    if largest < need.memory:
        raise OutOfMemory(f"{need.model} needs {_gib(need.memory)}; the largest node has {_gib(largest)}")
    raise Unavailable(f"no node has {_gib(need.memory)} free for {need.model} now", retry_after=5)


def _at(node: Node, reason: Reason, runner: Runner | None = None) -> Placement:
    # On one machine the runner's own socket saves a hop.
    direct = runner is not None and node.local and runner.socket
    return Placement(node.name, f"unix:{runner.socket}" if direct and runner else node.name, reason)


def _idle_memory(node: Node) -> int:
    return sum(r.memory for r in node.runners.values() if r.ready and not r.active and not r.queued)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


@step
async def dispatch(need: Need, excluded: Collection[str] = ()) -> Placement:
    """Place one request on the fleet as it is now."""
    fleet = await current_fleet()
    if not fleet.nodes:
        await fleet.wait_for_node(NODE_WAIT_S)
    return choose(fleet.nodes.values(), need, excluded)


async def infer(
    task: str,
    model: str,
    parameters: Parameters,
    *,
    media: Media | None = None,
    on_event: OnEvent | None = None,
    priority: Priority | None = None,
) -> Done:
    """Run one request of adapter `task` on the node that the dispatcher chooses.

    Args:
        model: name or alias in the catalogue; `""` is the first model of `task`.
        parameters: as the adapter defines them.
        priority: None means the job's own; normal outside of a job.
        on_event: gets deltas and progress; without it everything comes in `Done`.

    Raises:
        PayloadTooLarge: the parameters are more than one message to a node holds.
        SmiError: of the kind that `blocks.errors` lists.
    """
    fleet = await current_fleet()
    entry = fleet.catalogue.get(model, task) if model else fleet.catalogue.default(task)
    job, policy = current_job(), principal().policy
    _permit(entry, policy)
    priority = priority or (job.priority if job is not None else "normal")
    need = Need(entry.name, int(entry.memory), priority)
    wire = parameters.wire()
    if len(wire) > MAX_PARAMETERS:
        raise PayloadTooLarge(
            f"the request has {len(wire)} bytes of parameters; {MAX_PARAMETERS} bytes go to a node at once"
        )
    header = Header(
        request_id=_request_id(),
        model=entry.name,
        task=task,
        parameters=wire,
        priority=WIRE_PRIORITY[priority],
        policy=policy,
        stream=on_event is not None or job is not None,
        media=media is not None,
    )
    begun = False

    async def hand_on(event: Event) -> None:
        nonlocal begun
        if event.WhichOneof("event") == "progress":
            progress(event.progress.stage, event.progress.fraction)
        elif on_event is not None:
            begun = True
        if on_event is not None:
            await on_event(event)

    excluded: set[str] = set()
    bypassed: set[str] = set()
    refusal: SmiError | None = None
    while True:
        try:
            placement = await dispatch(need, excluded)
        except Unavailable as none_left:
            raise refusal or none_left from None
        target = placement.node if placement.node in bypassed else placement.target
        label(model=entry.name, node=placement.node, tier=entry.tier, placement=placement.reason)
        placed(entry.name, placement.node)
        chunks = media.chunks(fleet.storage) if media is not None else None
        try:
            return await fleet.client.run(target, placement.node, header, chunks, hand_on)
        except ModelNotFound:  # our catalogue has it: the node was started with an older one
            excluded.add(placement.node)
            refusal = refusal or Unavailable(
                f"no node knows model {entry.name!r} yet: nodes read models.toml when they start; start "
                f"{placement.node} anew"
            )
        except Unavailable as error:
            if begun:
                raise  # the client has seen a part of this answer, and must not see it again
            # A runner's socket that is gone says nothing of its node; a node that refuses is passed over.
            refusal = error
            (excluded if target == placement.node else bypassed).add(placement.node)


def _permit(model: Model, policy: Policy) -> None:
    if model.tier == "cloud" and policy != "any":
        raise PermissionDenied(
            f"model {model.name!r} is outside (tier cloud), and this request's data policy is {policy!r}",
            param="model",
        )


def _request_id() -> str:
    run, job = current(), current_job()
    if run is not None:
        return run.request_id
    return job.request_id if job is not None else str(flow_run.name or "script")
