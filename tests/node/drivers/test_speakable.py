"""deployments/node/drivers/speakable.py: what a voice would pass over is put into words or refused."""

from __future__ import annotations

import pytest

from blocks.errors import InvalidRequest
from deployments.node.drivers.speakable import speakable

LETTERS = set("àéïöüßŁź")
KNOWN = {"½", "°", "¥", "£", "€"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Plain text, $5.", "Plain text, $5."),
        ("20 € or 7.50£ or 3$", "€20 or £7.50 or $3"),
        ("from €5 to 10", "from €5 to 10"),
        ("−5", "-5"),
        ("x ≥ 3", "x  greater than or equal to  3"),
        ("∞", " infinity "),
        ("₿5", " bitcoin 5"),
        ("α-particle, Δx", " alpha -particle,  delta x"),
        ("½ at 5° for ¥3", "½ at 5° for ¥3"),
        ("⅓ Ⅷ ①", "1/3 VIII 1"),
        ("cafe\N{COMBINING ACUTE ACCENT}", "café"),
        ("Việt Nam", "Viet Nam"),
        ("ﬁne ｆｕｌｌ", "fine full"),
        ("hi 😀 there… • ok", "hi 😀 there… • ok"),
        ("1,234,567,890", "1,234,567,890"),
        ("1" * 16, " ".join("1" * 16)),
        ("1," * 20 + "1", " ".join("1" * 21)),
        ("a" * 50, f"{'a' * 24} {'a' * 24} aa"),
        ("a'" * 30 + "a", None),
        ("see http://example.org/a/b", "see http://example.org/a/b"),
        (
            "http://example.org/some/long/path/to/a/page.html",
            "http://example.org/some/long/path/to/a/ page.html",
        ),
        ("1a" * 30, f"{'1a' * 20} {'1a' * 10}"),
    ],
)
def test_put_into_words(text: str, said: str | None) -> None:
    got = speakable(text, LETTERS, KNOWN)
    if said is None:
        assert max(map(len, got.split())) <= 24
        assert got.replace(" ", "") == text
    else:
        assert got == said


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Привет", "CYRILLIC"),
        ("hello 世界", "CJK"),
        ("λόγος", "GREEK"),
        ("مرحبا", "ARABIC"),
        ("ok ㈠", "PARENTHESIZED IDEOGRAPH"),
    ],
)
def test_other_scripts_are_refused(text: str, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        speakable(text, LETTERS, KNOWN)
    assert refused.value.param == "input"
    assert name in refused.value.detail
    assert not set(text) & set(refused.value.message) - set("helok ")
