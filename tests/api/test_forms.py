"""Fields of forms, which all routes read in one way."""

from __future__ import annotations

import io

import httpx
import pytest
from starlette.datastructures import FormData, UploadFile

from blocks.errors import InvalidRequest
from deployments.api.forms import parts

LONG = "n" * 100_000


def upload() -> UploadFile:
    return UploadFile(io.BytesIO(b"x"), filename="x")


def test_texts_and_files_by_name() -> None:
    file = upload()
    form = FormData([("a", "1"), ("file", file), ("include[]", "x"), ("include[]", "y")])
    assert parts(form, "file") == ({"a": "1", "include[]": "y"}, {"file": file})
    assert parts(FormData([("b", file)])) == ({}, {"b": file})


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([("a", "1"), ("a", "1")], "'a' is given more than once"),
        ([("file", upload()), ("file", "x")], "'file' is given more than once"),
        ([("a", upload())], "'a' is not a file; the file belongs in 'file'"),
        ([(LONG, "1"), (LONG, "2")], "is given more than once"),
        ([(LONG, upload())], "is not a file"),
    ],
)
def test_what_is_wrong_is_told_by_a_short_name(items: list[tuple[str, str | UploadFile]], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parts(FormData(items), "file")
    assert said in refused.value.message
    assert len(refused.value.message) < 200
    assert len(refused.value.param or "") < 80


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/pipelines", "/v1/audio/transcriptions"])
async def test_a_field_given_twice_is_refused_by_every_form(http: httpx.AsyncClient, path: str) -> None:
    fields = [("model", (None, "a")), ("model", (None, "b")), ("file", ("a.wav", b"RIFF"))]
    answer = await http.post(path, files=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "'model' is given more than once"
