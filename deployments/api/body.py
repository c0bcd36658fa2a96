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
    message = await request.receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body") and len(body) <= limit:
        return body
    receive = limited(request, limit, message)
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def limited(request: Request, limit: int, first: Message | None = None) -> Receive:
    """The request's `receive`, with the limit watched over; `first` has been received already."""
    declared = request.headers.get("content-length", "")
    too_large = PayloadTooLarge(f"the body may have at most {limit} bytes")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    size = 0

    async def receive() -> Message:
        nonlocal size, first
        message, first = first or await request.receive(), None
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before its request was whole")
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large
        return message

    return receive
