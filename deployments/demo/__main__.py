"""`make demo`: the whole main job, as one pipeline, looked at from outside as a user would."""

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

from blocks.errors import SmiError
from blocks.settings import default_home
from deployments.client import ApiClient
from deployments.demo import checks
from deployments.demo.prefect import recorded
from deployments.up.installation import DOWN_S

DATA = Path(__file__).parents[2] / "tests" / "data"
PIPELINE = Path(__file__).parents[2] / "tests" / "examples" / "spoken-question.yaml"
DOCUMENTS = sorted((DATA / "documents").glob("[a-z]*.md"))
QUESTION = DATA / "speech" / "printing.wav"
PICTURE = DATA / "pictures" / "horse.png"
CITED = "printing.md"  # the document that answers the question
UNANSWERABLE = "Who won the football match yesterday?"
INDEX = "handbook"
PIPELINE_S = 200


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
            up.wait(DOWN_S)


def index_documents(client: ApiClient) -> None:
    """A fresh index of the documents that come along."""
    say(f"\n1. Documents: {len(DOCUMENTS)} files into the index `{INDEX}`")
    if any(index["name"] == INDEX for index in client.call("GET", "/indexes")["data"]):
        client.call("DELETE", f"/indexes/{INDEX}")
    client.call("POST", "/indexes", json={"name": INDEX})
    for document in DOCUMENTS:
        with document.open("rb") as content:
            added = client.call("POST", f"/indexes/{INDEX}/files", files={"file": (document.name, content)})
        say(f"   {document.name}: {added['chunks']} chunks")


def run_pipeline(client: ApiClient, folder: Path, request_id: str) -> dict[str, Any]:
    """The pipeline's result, by step; its files are in `folder`.

    Raises:
        SmiError: it failed, or took too long.
    """
    say(f"\n2. Pipeline {PIPELINE.name}: a spoken question, answered aloud from the documents; a picture,")
    say("   cut out and enlarged. (In a new home each model is loaded first.)")
    files = {"question": QUESTION, "picture": PICTURE}
    job = client.submit_pipeline(PIPELINE.read_text(), {"index": INDEX}, files, "normal", request_id)
    job = client.wait(job, lambda text: say(f"   {text}"), PIPELINE_S)
    steps: dict[str, Any] = client.result(job)["steps"]
    client.download(job, folder)
    return {name: step["result"] for name, step in steps.items()}


def show(results: dict[str, Any], folder: Path, client: ApiClient) -> None:
    """Print what came of it, each result checked.

    Raises:
        SmiError: one is not what it should be.
    """
    answer = results["answer"]
    say(f"\n   heard:    {results['transcribe']['text'].strip()}")
    say(f"   answered: {answer['text']}")
    say(f"   citing:   {checks.cited(answer, CITED)}:")
    say(f"             {' '.join(answer['citations'][0]['quote'].split())}")
    spoken = folder / results["speak"]["audio"]["name"]
    heard = client.transcribe(spoken, "whisper-1")
    say(f"   spoken:   {checks.said_again(answer['text'], heard)}\n             {spoken}")
    cut = folder / results["cut"]["picture"]["name"]
    say(f"   cut out:  {checks.mask(cut, PICTURE)}\n             {cut}")
    large = folder / results["enlarge"]["picture"]["name"]
    say(f"   enlarged: {checks.four_times(large, cut)}\n             {large}")


def abstain(client: ApiClient) -> None:
    """A question that the documents do not answer."""
    say(f"\n3. A question that they do not answer: {UNANSWERABLE}")
    job = client.submit("ask", {"index": INDEX, "question": UNANSWERABLE}, None, "normal", None)
    answer = client.result(client.wait(job, lambda text: None, PIPELINE_S))
    say(f"   answered: {checks.abstained(answer)}")


def live(url: str, key: str, question: str, request_id: str) -> None:
    """A question with OpenAI's own client, printed as it comes."""
    import openai

    say(f"\n4. Live, through the openai client, streamed: {question}")
    began, first = time.monotonic(), 0.0
    sys.stdout.write("   answered: ")
    with openai.OpenAI(base_url=url, api_key=key).chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": question}],
        max_tokens=40,
        temperature=0,
        stream=True,
        extra_headers={"x-request-id": request_id},
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic() - began
                sys.stdout.write(chunk.choices[0].delta.content)
                sys.stdout.flush()
    say(f"\n   first words after {first:.2f} s, all after {time.monotonic() - began:.2f} s")


def demo(home: Path, keep: bool) -> None:
    say(f"Starting SMI in {home} (the first start of a home takes some seconds longer)")
    job_id, live_id = (f"demo-{kind}-{secrets.token_hex(4)}" for kind in ("job", "live"))
    folder = home / "demo" / job_id
    with installation(home, keep) as up:
        url = f"{up['url']}/v1"
        say(f"SMI is up: {up['url']}")
        client = ApiClient(url, up["key"])
        index_documents(client)
        show(run_pipeline(client, folder, job_id), folder, client)
        abstain(client)
        live(url, up["key"], "What is the capital of France?", live_id)
        say(f"\nIn Prefect ({up['prefect_url'].removesuffix('/api')}, login {up['prefect_auth']}):")
        for request_id in (job_id, live_id):
            say(f"   {recorded(up, request_id)}")
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
