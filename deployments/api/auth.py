"""Who calls: the bearer key of a request."""

from __future__ import annotations

from blocks.errors import Unauthenticated
from deployments.api.keys import KeyInfo, Keys

PUBLIC = frozenset({"/health", "/docs", "/openapi.json"})


async def authenticate(keys: Keys, authorization: bytes | None) -> KeyInfo:
    """The owner of the key in an `Authorization` header.

    Raises:
        Unauthenticated: there is none, or it is not good.
    """
    if authorization is None:
        raise Unauthenticated("no API key: send the header `Authorization: Bearer sk-smi-...`")
    scheme, _, key = authorization.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the Authorization header must read `Bearer sk-smi-...`")
    return await keys.owner(key.strip())
