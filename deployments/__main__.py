"""`python -m deployments` is `smi`."""

from deployments.cli import main

main()
