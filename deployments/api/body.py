"""Read a request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message, Receive

from blocks.errors import Cancelled, PayloadTooLarge

MAX_JSON = 32 * 2**20


async def read_body(request: Request, limit: int = MAX_JSON) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLarge: it has more than `limit` bytes; said before they are read if the header tells.
        Cancelled: the client left while sending.
    """
    receive = limited(request, limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts = [body]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


def limited(request: Request, limit: int) -> Receive:
    """The request's `receive`, with the limit watched over."""
    declared = request.headers.get("content-length", "")
    too_large = PayloadTooLarge(f"the body may have at most {limit} bytes")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was whole")
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large
        return message

    return receive
