"""What runs on an organisation's own machines tells nobody of it."""

import os
import subprocess
import sys
from pathlib import Path


def test_no_library_keeps_or_sends_telemetry(tmp_path: Path) -> None:
    """ONNX Runtime queues events for its makers in the home's cache unless it is told not to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "HF_"))}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    script = "import deployments, onnxruntime, os; print(os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "1"
    assert list(tmp_path.rglob("*")) == []
