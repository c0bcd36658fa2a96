"""The process that reads one PDF: `python -m ... MEMORY SECONDS MAX_PAGES`, the PDF as its stdin.

Says, a line of JSON each: `{"pages": 3}`, then `{"number": 1, "text": "..."}` for each; or
`{"refused": "why"}`. What is unforeseen, as broken PDFs are, ends it with an exit code.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import traceback
from types import TracebackType
from typing import Any

OUT_OF_MEMORY = 3


def main(memory: int, seconds: int, max_pages: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    logging.disable()  # pypdf's warnings may quote the document
    from pypdf import PdfReader

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    reader = PdfReader(sys.stdin.buffer)
    if reader.is_encrypted and not reader.decrypt(""):  # many need no password to be read
        _say(refused="the PDF is encrypted; give one without a password")
        return
    total = len(reader.pages)
    if total > max_pages:
        _say(refused=f"the PDF has {total} pages; at most {max_pages} are read: give it in parts")
        return
    _say(pages=total)
    for number in range(1, total + 1):
        _say(number=number, text=reader.pages[number - 1].extract_text())


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _where(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Tell where it ended, without the error's text, which may quote the document."""
    last = traceback.extract_tb(at)[-1]
    sys.stderr.write(f"a PDF cannot be read: {kind.__name__} at {last.filename}:{last.lineno}\n")


if __name__ == "__main__":
    sys.excepthook = _where
    try:
        main(*map(int, sys.argv[1:]))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
