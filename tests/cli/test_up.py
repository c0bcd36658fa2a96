"""`smi up` and what it leaves behind: on the session's installation where that is possible."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from blocks.errors import ConfigurationError
from blocks.settings import Settings, default_home
from deployments.api.main import GRACE_S
from deployments.recorder.spool import DRAIN_S, OPEN_S
from deployments.up import banner, installation
from deployments.up.prefect_server import http_answers
from deployments.up.processes import HOME, SERVICE, Recorded, State, members, only_one, stop_leftovers
from deployments.up.supervise import Service, StartFailed, Supervisor

UP = [sys.executable, "-P", "-m", "deployments", "up", "--port=0", "--node-port=0", "--prefect-port=0"]
NAMES = {"postgres", "prefect", "vectors", "node", "jobs", "api"}


def test_status_shows_every_process_healthy(smi, smi_command):
    answer = smi_command("status", "--home", str(smi.home), "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    entries = {entry["name"]: entry for entry in json.loads(answer.stdout)}
    assert entries.keys() == NAMES | {"up"}
    states = {name: entry["state"] for name, entry in entries.items()}
    assert states == {name: "running" if name in ("up", "jobs") else "healthy" for name in entries}
    assert entries["api"]["port"] == int(smi.url.rpartition(":")[2])


def test_logs_are_shown_by_name(smi, smi_command):
    shown = smi_command("logs", "postgres", "--home", str(smi.home), "-n", "1000")
    assert "ready to accept connections" in shown.stdout
    unknown = smi_command("logs", "nothing", "--home", str(smi.home))
    assert unknown.returncode == 1
    assert "there are: api," in unknown.stderr


def test_where_nothing_runs_the_home_is_named(tmp_path, smi_command):
    for command, code in (("status", 3), ("down", 0), ("logs", 1)):
        answer = smi_command(command, "--home", str(tmp_path))
        assert answer.returncode == code
        assert f"in {tmp_path}" in answer.stderr
        assert "--home" in answer.stderr


def test_the_banner_names_a_home_that_others_must_know(tmp_path):
    settings = Settings(home=tmp_path / "my home", prefect_url="http://x/api", prefect_auth="a:b")
    text = banner.text(settings, "sk-smi-x")
    assert f"export SMI_HOME='{tmp_path}/my home'\n" in text
    section = re.search(r'README.md, "(.+?)"', text)[1]
    assert f"\n## {section}\n" in Path("README.md").read_text()
    usual = settings.model_copy(update={"home": default_home()})
    assert "SMI_HOME" not in banner.text(usual, "sk-smi-x")


def test_a_second_up_says_that_it_is_already_running(smi, smi_command):
    second = smi_command("up", "--home", str(smi.home))
    assert second.returncode == 1
    assert f"already running, pid {smi.up.pid}" in second.stderr
    assert "Traceback" not in second.stderr


def test_secrets_are_not_on_command_lines_and_files_are_private(smi):
    secrets = [smi.key, smi.prefect_auth, json.loads((smi.home / "settings.json").read_text())["join_token"]]
    for process in smi.processes():
        with suppress(psutil.NoSuchProcess):  # one that lived a moment only
            line = " ".join(process.cmdline())
            assert not any(secret in line for secret in secrets), process
    assert stat.S_IMODE((smi.home / "settings.json").stat().st_mode) == 0o600
    for name in ("postgres", "logs", "storage", "prefect", "vectors"):
        assert stat.S_IMODE((smi.home / name).stat().st_mode) == 0o700


def test_modes_of_ancestors_stay_as_they_were(smi, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # as mkdtemp made it, with PostgreSQL running below
    assert stat.S_IMODE(Path("/var/tmp").stat().st_mode) == 0o1777


def test_a_foreign_process_on_a_port_is_named_and_left_alone(tmp_path, smi_command):
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        answer = smi_command("up", "--home", str(tmp_path / "home"), "--port", str(port))
        assert answer.returncode == 1
        assert f"port {port}" in answer.stderr
        assert f"pid {os.getpid()}" in answer.stderr
        assert foreign.fileno() >= 0
    assert State.read(tmp_path / "home").processes == {}


def test_a_child_that_does_not_start_is_named_with_the_end_of_its_log(folder, smi_command):
    home = folder / "broken"
    home.mkdir()
    (home / "models.toml").write_text('[mine]\ntask = "chat"\ndriver = "echo"\nslots = "many"\n')
    answer = smi_command("up", "--home", str(home), "--port=0", "--node-port=0", "--prefect-port=0")
    assert answer.returncode == 1
    assert "smi: api ended with code " in answer.stderr
    assert "slots" in answer.stderr  # from its log
    assert "Traceback" not in answer.stderr.partition("The end of ")[0]
    assert recorded(home) == []


def test_a_child_that_dies_is_started_again(smi):
    jobs = State.read(smi.home).processes["jobs"]
    os.kill(jobs.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while State.read(smi.home).processes["jobs"].pid == jobs.pid:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert State.read(smi.home).processes["jobs"].process() is not None
    assert "jobs ended with signal SIGKILL" in (smi.home / "up.stderr").read_text()
    smi.pids["jobs"] = State.read(smi.home).processes["jobs"].pid


async def test_a_stream_that_is_open_when_the_api_stops_is_recorded_as_cancelled(smi, http, prefect):
    api = State.read(smi.home).processes["api"]
    asked = {"model": "echo-slow", "stream": True, "messages": [{"role": "user", "content": "sea " * 2000}]}
    async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        began = time.monotonic()
        os.kill(api.pid, signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            _ = [piece async for piece in pieces]
    while api.process() is not None:
        await asyncio.sleep(0.05)
    assert time.monotonic() - began < installation.STOP_S["api"]
    async with asyncio.timeout(30):
        while smi.pids["api"] == api.pid or not await http_answers(f"{smi.url}/health"):
            await asyncio.sleep(0.1)
            smi.pids["api"] = State.read(smi.home).processes["api"].pid
    named = {"flow_runs": {"tags": {"any_": [answer.headers["x-request-id"]]}}}
    runs = (await prefect.post("/flow_runs/filter", json=named)).json()
    assert [run["state_type"] for run in runs] == ["CANCELLED"]


def test_a_pid_with_another_start_time_is_somebody_else(tmp_path):
    me = Recorded.of("node", os.getpid())
    other = Recorded("node", me.pid, me.started - 60)
    assert me.process() == psutil.Process()
    assert other.process() is None
    assert members(other, tmp_path) == []
    State(processes={"node": other}).write(tmp_path)
    assert stop_leftovers(tmp_path) == []


def test_the_api_and_its_record_stop_within_their_time():
    assert installation.STOP_S["api"] > GRACE_S + OPEN_S + DRAIN_S + 1


@contextmanager
def child(home: Path, service: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process as `smi up` starts one, in a session of its own."""
    environment = {**os.environ, SERVICE: service, HOME: str(home)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_down_leaves_a_beginning_up_alone_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "BEGIN_S", 0.3)
    with child(tmp_path, "node", "sleep", "60") as node, only_one(tmp_path):
        State(processes={"node": Recorded.of("node", node.pid)}).write(tmp_path)
        with pytest.raises(ConfigurationError, match=f"already running, pid {os.getpid()}, "):
            installation.down(tmp_path)
        assert node.poll() is None
    assert (tmp_path / "state.json").exists()


def test_down_where_nothing_ever_ran_touches_nothing(tmp_path):
    assert installation.down(tmp_path / "nowhere") == installation.down(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_shell_with_the_environment_of_a_child_is_spared(tmp_path):
    find = "from pathlib import Path; from deployments.up.processes import unrecorded;"
    find += f"print([process.pid for process in unrecorded(Path({str(tmp_path)!r}))])"
    shell = ["sh", "-c", 'sleep 30 & "$0" -c "$1"; kill $!', sys.executable, find]
    with child(tmp_path, "node", "sleep", "60") as stray, child(tmp_path, "jobs", *shell) as ours:
        assert json.loads(ours.stdout.readline()) == [stray.pid]
        ours.wait()


@pytest.mark.parametrize(("service", "sign"), [("postgres", "SIGINT"), ("jobs", "SIGTERM")])
def test_what_was_not_recorded_is_stopped_as_it_should_be(service, sign, tmp_path):
    wait = "import signal; both = {signal.SIGINT, signal.SIGTERM}; signal.pthread_sigmask(0, both);"
    wait += "print(flush=True); print(signal.sigwait(both).name)"
    with child(tmp_path, service, sys.executable, "-c", wait) as process:
        process.stdout.readline()
        assert [left.pid for left in stop_leftovers(tmp_path)] == [process.pid]
        assert process.stdout.readline().strip() == sign


async def test_a_command_that_ends_at_once_is_told(tmp_path):
    (tmp_path / "logs").mkdir()
    for _ in range(5):
        with pytest.raises(StartFailed, match="prepare ended with code 1"):
            await Supervisor(tmp_path, print).run_once("prepare", ["/bin/false"], {})


async def test_a_child_that_cannot_be_started_now_is_started_later(tmp_path):
    (tmp_path / "logs").mkdir()
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)

    async def ready() -> bool:
        return True

    said: list[str] = []
    supervisor, service = Supervisor(tmp_path, said.append), Service("jobs", [str(program)], {}, ready)
    await supervisor.start(service)
    first = service.process
    program.rename(away)
    first.kill()
    async with asyncio.timeout(10):
        while "jobs cannot be started (No such file or directory)" not in said:
            await asyncio.sleep(0.05)
        away.rename(program)
        while service.process is first:
            await asyncio.sleep(0.05)
    assert service.process.returncode is None
    await supervisor.stop(asyncio.Event())
    assert service.process.returncode == -signal.SIGTERM


@contextmanager
def starting(home: Path, until: str) -> Iterator[subprocess.Popen[bytes]]:
    """`smi up` that has come as far as to record a process of that name; killed in the end."""
    with (home.with_name(f"{home.name}.stderr")).open("ab") as stderr:
        up = subprocess.Popen(
            [*UP, "--home", str(home)], stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
    deadline = time.monotonic() + 60
    try:
        while not (State.read(home).up and State.read(home).up.pid == up.pid) or not recorded(home, until):
            assert time.monotonic() < deadline
            assert up.poll() is None
            time.sleep(0.05)
        yield up
    finally:
        up.kill()
        up.wait()


def recorded(home: Path, name: str = "") -> list[psutil.Process]:
    """What runs of a recorded process, or of all, with what it started."""
    entries = [entry for entry in State.read(home).processes.values() if name in ("", entry.name)]
    return [process for entry in entries for process in members(entry, home)]


def test_kill_9_of_up_then_up_again_reclaims_and_down_stops(folder, smi_command):
    home = folder / "reclaimed"
    with starting(home, "api"):
        pass  # and kill -9
    left = recorded(home)
    assert {process.name() for process in left} >= {"postgres"}
    with starting(home, "api") as up:
        assert [process for process in left if process.is_running()] == []
        assert "was left by an earlier `smi up`; stopped" in Path(f"{home}.stderr").read_text()
        running = recorded(home)
        answer = smi_command("down", "--home", str(home))
        assert answer.returncode == 0, answer.stderr
        assert up.wait(5) == 0
        assert [process for process in running if process.is_running()] == []
    assert "nothing is running" in smi_command("down", "--home", str(home)).stderr
    assert smi_command("status", "--home", str(home)).returncode == 3


def test_down_stops_what_a_killed_up_left_even_unrecorded(folder, smi_command):
    home = folder / "left"
    with starting(home, "prefect"):
        pass
    left = recorded(home)
    assert left
    state = State.read(home)
    del state.processes["prefect"]  # as if it had been killed just before it wrote this down
    state.write(home)
    assert "stopped: " in smi_command("down", "--home", str(home)).stderr
    assert [process for process in left if process.is_running()] == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_starting_leaves_no_process(sign, folder):
    home = folder / f"early-{sign.name}"
    with starting(home, "prefect") as up:
        started = recorded(home)
        up.send_signal(sign)
        assert up.wait(20) == 0
        assert [process for process in started if process.is_running()] == []


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_no_process_of_a_whole_installation(sign, folder, start_smi):
    running = start_smi(folder / f"whole-{sign.name}")
    began = time.monotonic()
    assert running.stop(sign) == []
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_killed_whole_installation_is_reclaimed(folder, start_smi):
    first = start_smi(folder / "whole")
    left = [process for process in first.processes() if process.pid != first.up.pid]
    first.up.kill()
    first.up.wait()
    first.up.stdout.close()
    second = start_smi(folder / "whole")
    assert [process for process in left if process.is_running()] == []
    assert second.stop() == []
