"""Links to a run's files that open in a browser without a key: signed, and good for a while.

The signature is over path and expiry, under a key derived from the join token: whoever has a link has that
one file, until it expires.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from urllib.parse import quote

from blocks.errors import PermissionDenied
from blocks.settings import Settings

# What a link may lead to: files, and the result of a run that has no job.
PATH = re.compile(r"/v1/(?:(?:jobs|runs)/[^/]+/files/.+|runs/[^/]+/result)")
DAY_S = 24 * 3600


def link(settings: Settings, path: str) -> str:
    """A URL of `path`, such as `/v1/jobs/job_1/files/speak/speech.wav`."""
    expires = int(time.time() + settings.link_days * DAY_S)
    signature = _signature(settings.require("join_token"), path, expires)
    return f"{settings.url}{quote(path)}?expires={expires}&signature={signature}"


def check_link(settings: Settings, path: str, expires: str, signature: str) -> None:
    """Let pass a link that is ours and not too old.

    Raises:
        PermissionDenied: which of the two it is not.
    """
    right = _signature(settings.require("join_token"), path, expires)
    if PATH.fullmatch(path) is None or not hmac.compare_digest(right.encode(), signature.encode()):
        raise PermissionDenied("this link's signature is not ours: it was changed or cut; ask for it anew")
    if int(expires) < time.time():
        raise PermissionDenied("this link has expired; ask for the file with an API key")


def _signature(token: str, path: str, expires: int | str) -> str:
    key = hmac.new(token.encode(), b"smi links to files", hashlib.sha256).digest()
    return hmac.new(key, f"{expires}|{path}".encode(), hashlib.sha256).hexdigest()
