"""The record of live runs in Prefect, kept beside the answers.

The API only appends to a spool on disk (`spool`). A process of its own per API (`python -m
deployments.recorder`) follows the spool (`journal`), and writes to Prefect (`writer`, `prefect_runs`).
So the answers never wait for Prefect, and records outlive a crash of either and an outage of Prefect.
"""
