"""The node's Prefect worker: `python -m deployments.node.worker --name 127.0.0.1:8100 --pool cpu`.

Importing this module (as Prefect does, through the entry point group `prefect.collections`) makes the
worker type `smi` known; running it starts a worker.
"""

from deployments.node.worker_process import main

if __name__ == "__main__":
    main()  # imports the type itself, once Prefect's settings are in the environment
else:
    from deployments.node.worker_type import NodeWorker

__all__ = ["NodeWorker", "main"]
