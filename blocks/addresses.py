"""Addresses, and whose machines they are."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and nobody else reaches it."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_ours(url: str) -> bool:
    """Whether `url` certainly leads to a machine of ours: to this one, or a private or link-local address.

    Names other than `localhost` are not resolved: they may lead elsewhere tomorrow.
    """
    host = urlsplit(url).hostname or ""
    address = _address(host)
    return is_loopback(host) or (address is not None and (address.is_private or address.is_link_local))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
