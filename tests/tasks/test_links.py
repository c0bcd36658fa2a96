"""Links to files: signed, for one path, for a while."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from blocks.errors import PermissionDenied
from blocks.settings import Settings
from tasks.links import check_link, link

PATH = "/v1/jobs/job_1/files/cut out/a ü.png"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, join_token="token", api_port=8123)


def parts(url: str) -> tuple[str, str, str]:
    split = urlsplit(url)
    query = parse_qs(split.query)
    return unquote(split.path), query["expires"][0], query["signature"][0]


def test_a_link_of_ours_is_good(settings: Settings) -> None:
    url = link(settings, PATH)
    assert url.startswith("http://127.0.0.1:8123/v1/jobs/job_1/files/cut%20out/")
    assert parts(url)[0] == PATH
    check_link(settings, *parts(url))


def test_it_leads_to_where_browsers_reach_the_api(settings: Settings) -> None:
    public = settings.model_copy(update={"public_url": "https://smi.example.org/"})
    assert link(public, PATH).startswith("https://smi.example.org/v1/jobs/")


@pytest.mark.parametrize(
    ("path", "later", "flip", "token", "told"),
    [
        (PATH.replace("job_1", "job_2"), 0, False, "token", "not ours"),
        (PATH.replace(".png", ".jpg"), 0, False, "token", "not ours"),
        (PATH, 60, False, "token", "not ours"),
        (PATH, 0, True, "token", "not ours"),
        (PATH, 0, False, "another", "not ours"),
    ],
)
def test_one_that_was_changed_is_not(
    settings: Settings, path: str, later: int, flip: bool, token: str, told: str
) -> None:
    _, expires, signature = parts(link(settings, PATH))
    changed = Settings(home=settings.home, join_token=token)
    if flip:
        signature = re.sub("^.", lambda first: "0" if first[0] != "0" else "1", signature)
    with pytest.raises(PermissionDenied, match=told):
        check_link(changed, path, str(int(expires) + later), signature)


def test_one_expires(settings: Settings) -> None:
    old = settings.model_copy(update={"link_days": -0.001})
    with pytest.raises(PermissionDenied, match="expired"):
        check_link(settings, *parts(link(old, PATH)))


@pytest.mark.parametrize("path", ["/v1/jobs/job_1", "/v1/jobs/job_1/result", "/v1/runs/run_1/result/x"])
def test_no_other_path_is_opened_by_a_signature(settings: Settings, path: str) -> None:
    with pytest.raises(PermissionDenied, match="not ours"):
        check_link(settings, *parts(link(settings, path)))


def test_the_result_of_a_run_without_a_job_is_opened(settings: Settings) -> None:
    check_link(settings, *parts(link(settings, "/v1/runs/run_1/result")))
