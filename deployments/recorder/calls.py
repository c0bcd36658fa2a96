"""Calls to Prefect, and what their failures mean for a record: try again, or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import orjson

T = TypeVar("T")
HEADERS = {"content-type": "application/json"}


class Away(Exception):
    """Prefect cannot take it now; the same will do later. The text says why, for the operator."""


class Gone(Away):
    """Something that was made for the record was deleted; it is made anew."""


class Refused(Exception):
    """Prefect will never take this."""


class Calls:
    """Prefect's API.

    Attributes:
        bisect_500: take a 500 for a fault in what was sent, to find the run that causes it.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.bisect_500 = False
        self._http = http

    async def healthy(self) -> bool:
        """Whether Prefect and its database answer."""
        try:
            return (await self._http.post("/flows/count", json={})).status_code == 200
        except httpx.HTTPError:
            return False

    async def post(self, path: str, body: Any) -> Any:
        answer = await self("POST", path, body)
        return orjson.loads(answer.content) if answer.content else None

    async def __call__(self, method: str, path: str, body: Any) -> httpx.Response:
        """One request.

        Raises:
            Away: no answer, or one that says try again; also wrong credentials, which are told.
            Refused: any other 4xx.
        """
        try:
            answer = await self._http.request(method, path, content=orjson.dumps(body), headers=HEADERS)
        except httpx.HTTPError as error:
            raise Away(f"Prefect does not answer ({type(error).__name__})") from error
        status = answer.status_code
        if status < 400:
            return answer
        if status in (401, 403):
            raise Away(f"Prefect refuses the recorder's credentials ({status}): see SMI_PREFECT_AUTH")
        if status == 404 and path.startswith("/deployments/"):
            raise Gone("the deployment of the record was deleted; making it anew")
        if status in (408, 429) or (status >= 500 and not (status == 500 and self.bisect_500)):
            raise Away(f"Prefect answers {status}")
        raise Refused(f"{status} on {path.rpartition('/')[2]}")


@contextmanager
def understood() -> Iterator[None]:
    """Within it, an answer of another shape than expected, as of another Prefect, is `Away`."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Away(f"Prefect's answer is not understood: {error!r}") from error


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def clean(text: str) -> str:
    """PostgreSQL stores no NUL."""
    return text.replace("\0", "\ufffd")
