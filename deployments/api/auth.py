"""Who calls: the bearer key of a request, or the signature of a link that was given away."""

from __future__ import annotations

from urllib.parse import parse_qs

from blocks.errors import PermissionDenied, Unauthenticated
from blocks.settings import Settings
from deployments.api.keys import KeyInfo, Keys
from deployments.api.swagger import SCRIPT, START, STYLE
from tasks.links import PATH, check_link

PUBLIC = frozenset({"/health", "/openapi.json", "/docs", SCRIPT, STYLE, START})


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


def signed(settings: Settings, method: str, path: str, query: bytes) -> bool:
    """Whether a request comes by a signed link, which needs no key.

    Raises:
        PermissionDenied: the signature is not ours, or too old.
    """
    if b"signature=" not in query or PATH.fullmatch(path) is None:
        return False
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    expires, signature = values.get("expires", []), values.get("signature", [])
    if method != "GET" or len(expires) != 1 or len(signature) != 1 or not expires[0].isdecimal():
        raise PermissionDenied(
            "a link to a file is read (GET), with `expires` and `signature` as it was given"
        )
    check_link(settings, path, expires[0], signature[0])
    return True
