"""HTTP as uvicorn reads it, with headers bounded."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.errors import HeadersTooLarge, error_body

MAX_HEADERS = 64 * 1024  # bytes


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431, and closes, once a client has sent more than `MAX_HEADERS` without an end of them.

    Counted is what the parser took since it last gave anything to the application: URL, headers and
    trailers, but no bodies.
    """

    _withheld = 0

    def data_received(self, data: bytes) -> None:
        self._withheld += len(data)
        super().data_received(data)
        if self._withheld > MAX_HEADERS and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._withheld = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._withheld = 0
        super().on_body(body)

    def _refuse(self) -> None:
        # While an earlier request is being answered, another answer would stand within its own.
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(HeadersTooLarge(f"headers may have at most {MAX_HEADERS} bytes in all"))
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
