"""A node: one machine's models, each in a process of its own, behind one gRPC service."""

import os

# Our children are forked before they use gRPC, or replaced at once: its fork handlers only log.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars in a log
