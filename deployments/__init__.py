"""What runs: the API, nodes, the jobs processor, the recorder, and the command that starts them."""

import os

# What runs on an organisation's own machines tells nobody of it. Read by libraries as they are imported.
for _switch in ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "ORT_DISABLE_TELEMETRY"):
    os.environ.setdefault(_switch, "1")
