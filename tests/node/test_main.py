"""deployments/node/main.py: what a node needs to start, and its second process."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from live_node import TOKEN, Events, LiveNode, Starter, alive_after
from pydantic import SecretStr

from blocks.errors import ConfigurationError, SmiError
from blocks.settings import Settings
from deployments.node.main import _keep_worker, serve_node
from deployments.node.runners import _socket_folder


def settings(home: Path) -> Settings:
    return Settings(home=home, join_token=SecretStr(TOKEN))


async def test_a_taken_port_is_named_with_the_cure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{port}.*SMI_NODE_PORT"):
            await serve_node(settings(tmp_path), pool="cpu", port=port, worker=False)
    assert capfd.readouterr().err == ""  # gRPC would print what it failed at


async def test_a_second_node_of_a_home_takes_any_free_port(start_node: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        live = await asyncio.to_thread(start_node, configured=port)
    log = (live.home / "log").read_text()
    assert live.name != f"127.0.0.1:{port}"
    assert f"port {port} is taken; this node takes any free one" in log
    assert "add_port" not in log
    assert await live.ask("fast") == "one two three"
    await live.client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node.example.org"])
async def test_prompts_never_cross_the_network_unencrypted(tmp_path: Path, host: str) -> None:
    there = settings(tmp_path).model_copy(update={"host": host})
    with pytest.raises(ConfigurationError, match="unencrypted"):
        await serve_node(there, pool="cpu", port=0, worker=False)


async def test_a_gpu_pool_must_say_its_memory_and_a_node_its_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--memory"):
        await serve_node(settings(tmp_path), pool="gpu-24gb", port=0, worker=False)
    with pytest.raises(ConfigurationError, match="SMI_JOIN_TOKEN"):
        await serve_node(Settings(home=tmp_path, join_token=None), pool="cpu", port=0, worker=False)


def test_sockets_lie_in_a_private_folder_with_a_short_path(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    (run / "4194303-1.sock").touch()
    assert _socket_folder(run) == run
    assert run.stat().st_mode & 0o777 == 0o700
    assert list(run.iterdir()) == []
    elsewhere = _socket_folder(tmp_path / ("long" * 30))
    assert len(str(elsewhere)) < 40
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    elsewhere.rmdir()


def workers(live: LiveNode) -> list[psutil.Process]:
    return [process for process in psutil.Process(live.process.pid).children() if _is_worker(process)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "deployments.node.worker" in process.cmdline()
    except psutil.NoSuchProcess:  # which a zombie is as well
        return False


async def test_the_worker_is_started_again_and_ends_with_a_killed_node(start_node: Starter) -> None:
    live = start_node(worker=True)
    async with asyncio.timeout(30):
        while not workers(live):
            await asyncio.sleep(0.05)
        (first,) = workers(live)
        first.kill()
        while first in workers(live) or not workers(live):
            await asyncio.sleep(0.05)
    (second,) = workers(live)
    assert second.pid != first.pid
    environment = second.environ()
    assert environment["SMI_HOME"] == str(live.home)
    assert environment["SMI_JOIN_TOKEN"] == TOKEN
    await asyncio.sleep(1)  # it watches its standard input from its first second
    live.process.send_signal(signal.SIGKILL)
    live.process.wait()
    assert not alive_after([second], 2)


async def test_a_worker_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, started = tmp_path / "python", tmp_path / "started"
    monkeypatch.setattr(sys, "executable", str(program))
    with caplog.at_level(logging.WARNING, "smi.node"):
        keeping = asyncio.create_task(_keep_worker(settings(tmp_path), "here:1", "cpu"))
        async with asyncio.timeout(10):
            while "did not start (FileNotFoundError)" not in caplog.text:
                await asyncio.sleep(0.01)
            program.write_text(f"#!/bin/sh\ntouch {started}\nexec cat\n")
            program.chmod(0o700)
            while not started.exists():
                await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled()


async def test_a_node_stops_in_7_s_whatever_its_worker_and_its_runners_do(start_node: Starter) -> None:
    live = start_node(worker=True)
    await live.ask("fast")
    events = Events()
    header = live.header("paced", "word " * 1000, stream=True)
    working = asyncio.create_task(live.run(header, on_event=events))
    await asyncio.wait_for(events.begun.wait(), 20)
    (worker,) = workers(live)
    runner = psutil.Process((await live.runner("fast")).pid)
    below = psutil.Process(live.process.pid).children(recursive=True)
    for stuck in (worker, runner):
        stuck.suspend()
    began = time.monotonic()
    live.process.send_signal(signal.SIGTERM)
    with pytest.raises(SmiError):
        await working
    assert await asyncio.to_thread(live.process.wait, 20) == 0
    assert time.monotonic() - began < 7
    assert not alive_after(below, 2)
    await live.client.close()
