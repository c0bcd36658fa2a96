"""`choose`: the order of preference, without I/O."""

import pytest

from blocks.errors import OutOfMemory, Unavailable
from tasks.dispatch import Need, choose
from tasks.fleet import Node, Runner

GIB = 2**30
NEED = Need("m", 4 * GIB)


def node(name: str, total: int = 8, free: int = 8, *runners: Runner, **more: bool) -> Node:
    return Node(name, "cpu", total * GIB, free * GIB, {runner.model: runner for runner in runners}, **more)


def test_a_warm_runner_with_a_free_slot_comes_first() -> None:
    nodes = [node("empty:1"), node("warm:1", 80, 0, Runner("m", slots=2, active=1))]
    assert choose(nodes, NEED).node == "warm:1"


def test_the_least_loaded_of_warm_runners() -> None:
    nodes = [
        node("a:1", 8, 0, Runner("m", slots=4, active=3)),
        node("b:1", 8, 0, Runner("m", slots=4, active=1)),
    ]
    assert choose(nodes, NEED).node == "b:1"


def test_a_load_under_way_is_joined_not_repeated_elsewhere() -> None:
    nodes = [node("empty:1"), node("loading:1", 8, 4, Runner("m", ready=False))]
    placement = choose(nodes, NEED)
    assert (placement.node, placement.reason) == ("loading:1", "loading")


def test_the_smallest_sufficient_node_keeps_big_gpus_free() -> None:
    nodes = [node("big:1", 80, 80), node("fits:1", 8, 8), node("small:1", 2, 2)]
    assert choose(nodes, NEED).node == "fits:1"


def test_room_comes_before_eviction() -> None:
    nodes = [node("full:1", 8, 0, Runner("other", memory=8 * GIB)), node("big:1", 80, 80)]
    assert choose(nodes, NEED) == choose(nodes[::-1], NEED)
    assert choose(nodes, NEED).node == "big:1"


def test_only_idle_models_are_evicted() -> None:
    idle = node("idle:1", 8, 0, Runner("other", memory=8 * GIB))
    busy = node("busy:1", 4, 0, Runner("other", memory=4 * GIB, active=1))
    placement = choose([busy, idle], NEED)
    assert (placement.node, placement.reason) == ("idle:1", "evict")
    with pytest.raises(Unavailable, match=r"4\.00 GiB free for m now"):
        choose([busy], NEED)


def test_a_saturated_runner_is_waited_for_where_the_queue_is_shortest() -> None:
    nodes = [
        node("long:1", 4, 0, Runner("m", slots=1, active=1, queued=9)),
        node("short:1", 4, 0, Runner("m", slots=1, active=1, queued=1)),
    ]
    placement = choose(nodes, NEED)
    assert (placement.node, placement.reason) == ("short:1", "wait")


def test_on_one_machine_the_runner_is_called_directly() -> None:
    warm = node("n:1", 8, 0, Runner("m", socket="/run/m.sock"), local=True)
    assert choose([warm], NEED).target == "unix:/run/m.sock"
    assert choose([node("n:1", 8, 0, Runner("m", socket="/run/m.sock"))], NEED).target == "n:1"


def test_draining_and_excluded_nodes_get_nothing() -> None:
    nodes = [node("draining:1", draining=True), node("refused:1")]
    with pytest.raises(Unavailable, match="no node is connected"):
        choose(nodes, NEED, excluded={"refused:1"})


def test_a_model_larger_than_every_node_is_told_so() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 4\.00 GiB; the largest node has 2\.00 GiB"):
        choose([node("small:1", 2, 2)], NEED)
