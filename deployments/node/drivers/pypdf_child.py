"""The process that reads one PDF: `python -m ... MEMORY SECONDS MAX_PAGES`, the PDF as its stdin.

Says, a line of JSON each: `{"pages": 3}`, then `{"number": 1, "text": "..."}` for each; or
`{"refused": "why"}`. Anything unforeseen ends it with an exit code.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

OUT_OF_MEMORY = 3
LARGEST_STREAM = 32 << 20  # bytes of a stream when unpacked


def main(memory: int, seconds: int, max_pages: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    from pypdf import PdfReader, filters

    filters.ZLIB_MAX_OUTPUT_LENGTH = min(filters.ZLIB_MAX_OUTPUT_LENGTH, LARGEST_STREAM)
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


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
