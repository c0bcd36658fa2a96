"""Whether the demo's results are what they should be. Each check says in a line what it saw.

Raises `SmiError` where something is wrong: a demo that shows a failure as a success helps nobody.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from blocks.errors import SmiError

SAME = 0.85  # of the words that were spoken must be heard again
IOU = 0.9


def cited(answer: dict[str, Any], document: str) -> str:
    """The answer's citations; the first must be `document`."""
    names = [f"{one['name']} (page {one['page']}, score {one['score']:.2f})" for one in answer["citations"]]
    if not names or answer["citations"][0]["name"] != document:
        raise SmiError(f"the answer should cite {document} first, and cites: {', '.join(names) or 'nothing'}")
    return ", ".join(names)


def abstained(answer: dict[str, Any]) -> str:
    """The text of an answer that should be none."""
    if not answer["abstained"] or answer["citations"]:
        raise SmiError("a question that no document answers should not be answered")
    return str(answer["text"])


def said_again(text: str, heard: str) -> str:
    """How much of `text` was heard when it was spoken; numbers, contractions and case do not count."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normal = EnglishTextNormalizer({})  # type: ignore[no-untyped-call]
    meant, got = normal(text).split(), normal(heard).split()
    same = SequenceMatcher(None, meant, got, autojunk=False).ratio()
    if same < SAME:
        raise SmiError(f"only {same:.0%} of the spoken answer is heard again")
    return f"{same:.0%} of its words are heard again when it is transcribed"


def mask(cutout: Path, original: Path) -> str:
    """How well the cutout's mask fits the dark subject of `original`, on a white ground."""
    import numpy
    from PIL import Image

    with Image.open(cutout) as picture, Image.open(original) as truth:
        if picture.mode != "RGBA" or picture.size != truth.size:
            raise SmiError(f"{cutout} should have alpha and the original's size")
        found = numpy.asarray(picture.getchannel("A")) > 127
        wanted = numpy.asarray(truth.convert("L")) < 128
    iou = float((found & wanted).sum() / (found | wanted).sum())
    if iou < IOU:
        raise SmiError(f"the mask fits the subject with an IoU of {iou:.2f} only")
    return f"{picture.width} x {picture.height} with alpha, mask fits the subject (IoU {iou:.2f})"


def four_times(large: Path, small: Path) -> str:
    """The size of `large`, which is four times that of `small`, with alpha."""
    from PIL import Image

    with Image.open(large) as picture, Image.open(small) as before:
        if picture.mode != "RGBA" or picture.size != (4 * before.width, 4 * before.height):
            raise SmiError(f"{large} is {picture.size}, {picture.mode}: not four times {before.size}, RGBA")
    return f"{picture.width} x {picture.height}, with alpha"
