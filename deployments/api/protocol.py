"""HTTP as uvicorn speaks it, with headers bounded, and no patience with clients that stall."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.errors import HeadersTooLarge, error_body

MAX_HEADERS = 64 * 1024  # bytes
STALLED_S = 60.0  # a client that takes nothing of an answer for so long is taken to have left


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431, and closes, once a client has sent more than `MAX_HEADERS` without an end of them.

    Counted is what the parser took since it last gave anything to the application: URL, headers and
    trailers, but no bodies.

    Breaks the connection once the client has let an answer lie for `stalled_s`: whoever makes that answer
    waits, and may hold a model's slot meanwhile.
    """

    stalled_s = STALLED_S
    _withheld = 0
    _watch: asyncio.TimerHandle | None = None

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._look_no_more()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_no_more()
        super().connection_lost(exc)

    def _look_again(self, waiting: int) -> None:
        self._watch = self.loop.call_later(self.stalled_s, self._look, waiting)

    def _look(self, before: int) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self._look_again(waiting)
        else:
            self.transport.abort()

    def _look_no_more(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _refuse(self) -> None:
        # While an earlier request is being answered, another answer would stand within its own.
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(HeadersTooLarge(f"headers may have at most {MAX_HEADERS} bytes in all"))
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
