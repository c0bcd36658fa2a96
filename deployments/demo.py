"""`make demo`: a spoken question through every layer, as a job and then live, and both found in Prefect."""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from blocks.errors import SmiError
from blocks.settings import default_home
from deployments.client import ApiClient

QUESTION = Path(__file__).parent.parent / "tests" / "data" / "speech" / "question.wav"
JOB_S = 120
RECORD_S = 15
STOP_S = 45


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def installation(home: Path, keep: bool) -> Iterator[dict[str, Any]]:
    """`smi up` on free ports, and what it told of itself."""
    command = [sys.executable, "-P", "-m", "deployments", "up", "--home", str(home), "--new-key", "--json"]
    command += ["--port", "0", "--node-port", "0", "--prefect-port", "0"]
    # One that is left running must not hold on to this terminal or pipe; logs/up.log has its lines too.
    progress = subprocess.DEVNULL if keep else None
    up = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=progress,
        text=True,
        start_new_session=True,
    )
    assert up.stdout is not None
    done = False
    try:
        line = up.stdout.readline()
        if not line:
            raise SmiError(f"`smi up` ended with code {up.wait()}")
        yield json.loads(line)
        done = True
    finally:
        if not (keep and done):
            up.send_signal(signal.SIGTERM)
            up.wait(STOP_S)


def as_job(client: ApiClient, request_id: str) -> str:
    """Hand the recording in, wait, and print what came of it; the transcript."""
    say(f"\nAs a job: {QUESTION.name} to the flow `converse`, request id {request_id}")
    job = client.submit("converse", {"max_tokens": 60, "temperature": 0}, QUESTION, "normal", request_id)
    say("  (in a new home both models are loaded and the chat model is converted first: up to a minute)")
    result = client.result(client.wait(job, lambda text: say(f"  {text}"), JOB_S))
    say(f"  heard:    {result['transcript'].strip()}")
    say(f"  answered: {result['answer']['text'].strip()}")
    transcript: str = result["transcript"]
    return transcript


def live(url: str, key: str, question: str, request_id: str) -> None:
    """The same question with OpenAI's own client, printed as it comes."""
    import openai

    say(f"\nLive, through the openai client, streamed, request id {request_id}")
    began, first = time.monotonic(), 0.0
    sys.stdout.write("  answered: ")
    with openai.OpenAI(base_url=url, api_key=key).chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": question}],
        max_tokens=60,
        temperature=0,
        stream=True,
        extra_headers={"x-request-id": request_id},
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic() - began
                sys.stdout.write(chunk.choices[0].delta.content)
                sys.stdout.flush()
    say(f"\n  first words after {first:.2f} s, all after {time.monotonic() - began:.2f} s")


def recorded(up: dict[str, Any], request_id: str) -> tuple[str, str, list[str]]:
    """The request's run in Prefect: its page, its flow's state, and its task runs.

    Raises:
        SmiError: it is not there, complete and with task runs, in time.
    """
    user, _, password = up["prefect_auth"].partition(":")
    until = time.monotonic() + RECORD_S
    with httpx.Client(base_url=up["prefect_url"], auth=(user, password), trust_env=False) as http:
        while True:
            runs = _filtered(http, "flow_runs", {"flow_runs": {"tags": {"all_": [request_id]}}})
            if runs and runs[0]["state_type"] == "COMPLETED":
                tasks = _filtered(http, "task_runs", {"flow_runs": {"id": {"any_": [runs[0]["id"]]}}})
                if tasks:
                    page = f"{up['prefect_url'].removesuffix('/api')}/runs/flow-run/{runs[0]['id']}"
                    return page, runs[0]["state_name"], [task["name"] for task in tasks]
            if time.monotonic() > until:
                raise SmiError(
                    f"request {request_id} is not in Prefect with its task runs: found {len(runs)}"
                )
            time.sleep(0.3)


def _filtered(http: httpx.Client, kind: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.post(f"/{kind}/filter", json=body).raise_for_status().json()
    return found


def demo(home: Path, keep: bool) -> None:
    say(f"Starting SMI in {home} (the first start of a home takes some seconds longer)")
    job_id, live_id = (f"demo-{kind}-{secrets.token_hex(4)}" for kind in ("job", "live"))
    with installation(home, keep) as up:
        say(f"SMI is up: {up['url']}")
        url = f"{up['url']}/v1"
        transcript = as_job(ApiClient(url, up["key"]), job_id)
        live(url, up["key"], transcript.strip(), live_id)
        say(f"\nIn Prefect ({up['prefect_url'].removesuffix('/api')}, login {up['prefect_auth']}):")
        for request_id in (job_id, live_id):
            page, state, tasks = recorded(up, request_id)
            say(f"  {request_id}: {state}, task runs: {', '.join(tasks)}\n    {page}")
        if keep:
            say(f"\nLeft running. API {url}, key {up['key']}; stop it with: .venv/bin/smi down --home {home}")
        else:
            say("\nStopping. (`make demo KEEP=1` leaves it running, to look at those pages.)")


def main() -> None:
    """Entry point of `make demo`."""
    shipped = default_home()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=shipped.with_name(f"{shipped.name}-demo"))
    parser.add_argument("--keep", action="store_true", help="leave it running")
    options = parser.parse_args()
    home = options.home.expanduser().resolve()
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda *_: sys.exit("demo: told to stop"))
    began = time.monotonic()
    try:
        demo(home, options.keep)
    except SmiError as error:
        sys.exit(f"demo: {error.message}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    say(f"Done in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
