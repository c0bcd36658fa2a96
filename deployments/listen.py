"""How gRPC servers listen: at addresses that only this machine reaches, until there are certificates."""

from __future__ import annotations

import grpc
import grpc.aio

from blocks.addresses import is_loopback
from blocks.errors import ConfigurationError
from deployments.up.processes import is_free

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.keepalive_time_ms", 10_000),  # a client that vanished is noticed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients ping every 10 s during long silence
    ("grpc.http2.max_ping_strikes", 0),
]


def bind(server: grpc.aio.Server, target: str, host_setting: str, port_setting: str) -> int:
    """Have `server` listen at `target`, `unix:PATH` or `host:port` with a loopback host. Its port; 0: any.

    Args:
        host_setting, port_setting: what says the host and the port, for errors.

    Raises:
        ConfigurationError: the host is not loopback, or the target cannot be had.
    """
    taken = f"cannot listen at {target}, which something else may use; set {port_setting}"
    if not target.startswith("unix:"):
        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        if not is_loopback(host):
            raise ConfigurationError(
                f"will not listen at {target!r}: content would cross the network unencrypted, and there are "
                f"no certificates yet; say 127.0.0.1 in {host_setting} and reach others through a tunnel"
            )
        if port.isdigit() and not is_free(host, int(port)):  # where gRPC fails, it prints
            raise ConfigurationError(taken)
    try:
        return server.add_insecure_port(target)
    except RuntimeError as error:
        raise ConfigurationError(taken) from error
