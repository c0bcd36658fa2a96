"""deployments/node/drivers/detokeniser.py, with the chat model's real tokenizer."""

from __future__ import annotations

import pytest

from deployments.node.drivers.detokeniser import BROKEN, Detokeniser
from deployments.node.drivers.transformers import TransformersDriver

TEXTS = [
    "plain words,  two  spaces\n\n\tand a tab ",
    "🙂👩‍👩‍👧‍👦 family, flags 🇩🇪🇯🇵",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "naïve café — “quotes” … ½ × ∑",
    " leading and trailing ",
    "e\u0301 combining, zero\u200bwidth",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_split_over_tokens_is_neither_lost_nor_broken(
    smollm: TransformersDriver, text: str
) -> None:
    """dynamo#12630, exo#1691."""
    tokens = smollm.tokenizer.encode(text, add_special_tokens=False)
    words = Detokeniser(smollm._text)
    pieces = [words.feed(token) for token in tokens]
    assert "".join(pieces) + words.rest() == text
    assert not any(BROKEN in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_complete(smollm: TransformersDriver) -> None:
    tokens = smollm.tokenizer.encode("one two three four", add_special_tokens=False)
    words = Detokeniser(smollm._text)
    assert [words.feed(token) for token in tokens] == ["one", " two", " three", " four"]
    assert words.held == 0


def test_a_character_that_is_never_completed_is_left_out(smollm: TransformersDriver) -> None:
    tokens = smollm.tokenizer.encode("so 👩", add_special_tokens=False)
    words = Detokeniser(smollm._text)
    said = "".join(words.feed(token) for token in tokens[:-1])
    assert words.held > 0
    assert said + words.rest() in ("so", "so ")


def test_spaces_stay_where_a_tokenizer_drops_that_of_the_first_token() -> None:
    """As SentencePiece does: decoding each token alone would run the words together."""
    vocabulary = ["▁To", "▁be", ",", "▁or", "▁not"]
    words = Detokeniser(lambda ids: "".join(vocabulary[at] for at in ids).replace("▁", " ").removeprefix(" "))
    assert "".join(words.feed(at) for at in range(5)) == "To be, or not"
