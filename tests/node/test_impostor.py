"""A node proves itself before it is sent a prompt (tasks/fleet.py, against real nodes and a false one)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
from live_node import TOKEN, LiveNode
from pydantic import SecretStr

from blocks.settings import Settings
from tasks.fleet import Fleet
from tasks.protocol.auth import node_proof
from tasks.protocol.inference_pb2 import Event, NodeState, Request, WatchRequest
from tasks.protocol.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


class Impostor(InferenceServicer):
    """Claims to be a node, with a proof made from a guessed token."""

    def __init__(self) -> None:
        self.watched = 0
        self.prompts = 0
        self.name = ""

    async def Watch(
        self, request: WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[NodeState]:
        self.watched += 1
        proof = node_proof("guessed", self.name, request.nonce)
        while True:
            yield NodeState(name=self.name, pool="cpu", memory_total=2**40, proof=proof)
            await asyncio.sleep(0.05)

    async def Run(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Event]:
        self.prompts += 1
        yield Event()


async def test_an_impostor_is_not_listed_and_a_real_node_is(node: LiveNode, tmp_path: Path) -> None:
    impostor, server = Impostor(), grpc.aio.server()
    add_InferenceServicer_to_server(impostor, server)
    impostor.name = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    (tmp_path / "fleet.json").write_text(json.dumps([impostor.name, node.name]))
    fleet = Fleet(Settings(home=tmp_path, join_token=SecretStr(TOKEN), prefect_url="http://127.0.0.1:1/api"))
    await fleet.start()
    try:
        assert await fleet.wait_for_node(5)
        async with asyncio.timeout(5):
            while not impostor.watched:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert set(fleet.nodes) == {node.name}
        assert fleet.nodes[node.name].local
        assert impostor.prompts == 0
    finally:
        await fleet.stop()
        await server.stop(0)
