"""A conversation as tokens. What somebody says is text, also where it reads like a control token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict


class Turn(TypedDict):
    role: str
    content: str


def prompt_tokens(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """`turns` by the tokenizer's chat template, ready for the answer.

    A `<|im_end|>` in a turn's content must not end the turn, nor begin another in somebody else's role.

    Raises:
        jinja2.TemplateError: the template does not take these turns.
    """
    control = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if not any(token in turn["content"] for token in control for turn in turns):
        encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    # The template is filled with placeholders (private use characters), and what it makes is cut at them.
    empty = [{**turn, "content": f"\ue000{number}\ue001"} for number, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(empty, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = []
    for index, piece in enumerate(re.split("\ue000(\\d+)\ue001", text)):
        said = index % 2 == 1
        literal = turns[int(piece)]["content"] if said else piece
        encoded = tokenizer(literal, add_special_tokens=False, split_special_tokens=said)
        tokens += encoded["input_ids"]
    return tokens
