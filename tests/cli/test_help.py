"""`smi --help` is quick, because it imports neither torch nor Prefect."""

from __future__ import annotations

import subprocess
import sys
import time

SCRIPT = """
import sys
from deployments.cli import main
sys.argv = ["smi", *{arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "prefect", "transformers", "fastapi", "grpc", "openai", "sqlalchemy"}} & sys.modules.keys()
print("HEAVY", sorted(heavy))
"""


def test_help_is_under_a_second_and_lists_the_commands(smi_command):
    times = []
    for _ in range(3):
        began = time.perf_counter()
        answer = smi_command("--help")
        times.append(time.perf_counter() - began)
        assert answer.returncode == 0
    for name in (
        "up",
        "down",
        "status",
        "logs",
        "node",
        "api",
        "jobs",
        "vectors",
        "chat",
        "run",
        "models",
        "flows",
        "pools",
    ):
        assert f" {name} " in answer.stdout
    assert min(times) < 1


def test_help_and_models_import_nothing_heavy():
    for arguments in (["--help"], ["up", "--help"], ["models"]):
        script = SCRIPT.format(arguments=arguments)
        shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert "HEAVY []" in shown.stdout, arguments
