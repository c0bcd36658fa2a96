"""How a node and those who call it prove to each other that they know the join token, without sending it.

A node signs the caller's nonce in its first `Watch` message. A caller sends a proof bound to the node's
name and good for a minute, so that what one node (or an impostor) receives is of no use at another.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from grpc.aio import Metadata

METADATA = "x-smi-proof"
LIFETIME_S = 60


def _sign(token: str, text: bytes) -> bytes:
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def node_proof(token: str, name: str, nonce: bytes) -> bytes:
    """What a node named `name` (host:port) answers to `nonce`."""
    return _sign(token, b"node|" + name.encode() + b"|" + nonce)


def call_proof(token: str, audience: str, now: float | None = None) -> str:
    """The metadata value for calls to the node named `audience`."""
    expires = int((time.time() if now is None else now) + LIFETIME_S)
    return f"{expires}.{_sign(token, f'call|{audience}|{expires}'.encode()).hex()}"


class Caller:
    """Metadata for calls, signed anew only when half of its life is over."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._proofs: dict[str, tuple[float, Metadata]] = {}

    def metadata(self, audience: str) -> Metadata:
        now = time.time()
        known = self._proofs.get(audience)
        if known is not None and now < known[0]:
            return known[1]
        metadata = Metadata((METADATA, call_proof(self._token, audience, now)))
        self._proofs[audience] = (now + LIFETIME_S / 2, metadata)
        return metadata


class Gate:
    """Checks callers' proofs at the node named `name`; a proof seen before costs one look-up."""

    def __init__(self, token: str, name: str) -> None:
        self._token, self._name = token, name
        self._known: dict[str, int] = {}

    def admits(self, proof: str) -> bool:
        now = time.time()
        expires = self._known.get(proof)
        if expires is None:
            stamp, _, signature = proof.partition(".")
            if not stamp.isdecimal():
                return False
            right = _sign(self._token, f"call|{self._name}|{stamp}".encode()).hex()
            if not hmac.compare_digest(right, signature):
                return False
            expires = int(stamp)
            self._known = {known: end for known, end in self._known.items() if end > now}
            self._known[proof] = expires
        return expires > now
