"""A text as an English voice can read it out: what such a voice would pass over is put into words.

Emoji, bullets and the like are not said; a letter of another script is refused, never passed over.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection

from blocks.errors import InvalidRequest

LONGEST_NUMBER = 15  # digits; a longer one is read digit by digit
LONGEST_WORD = 24  # letters; models that spell out unknown words read no more of one
LONGEST_RUN = 40  # characters without a space; hibari's time grows with the third power of them
SYMBOLS = ("Sm", "Sc")  # mathematical and currency signs, said by their Unicode names
NUMERALS = ("Nl", "No")  # such as VIII and 1 in a circle, each a single character

_SIGN_LAST = re.compile(r"(?<![\w$£€.,])(\d(?:[\d.,]*\d)?)\s?([$£€])(?!\w)")
_GREEK = re.compile(r"(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])")
_GREEK_NAME = re.compile(r"GREEK (?:SMALL|CAPITAL) LETTER (?:FINAL )?([A-Z]+)")
_NUMBER = re.compile(rf"\d[\d,]{{{LONGEST_NUMBER - 1},}}\d")
_WORD = re.compile(rf"[^\W\d_](?:['’]?[^\W\d_]){{{LONGEST_WORD},}}")
_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}")
_MARK = re.compile(r"[^\w'’]")


def speakable(text: str, letters: Collection[str], known: Collection[str]) -> str:
    """`text` in ASCII, `letters` and `known`, and what nobody would read out.

    Args:
        letters: Latin letters with marks that the voice reads.
        known: other characters that it reads.

    Raises:
        InvalidRequest: naming the first letter that is not Latin.
    """
    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    text = _GREEK.sub(_greek, text)
    text = "".join(
        mark if mark.isascii() or mark in letters or mark in known else _in_latin(mark, letters)
        for mark in text
    )
    text = _SIGN_LAST.sub(r"\2\1", text)
    text = _NUMBER.sub(_by_digits, text)
    return _RUN.sub(_in_runs, _WORD.sub(_in_parts, text))


def _greek(match: re.Match[str]) -> str:
    """A single Greek letter by its name, as in formulas; Greek words stay, and are refused."""
    named = _GREEK_NAME.match(unicodedata.name(match[0], ""))
    return f" {named[1].lower()} " if named else match[0]


def _in_latin(mark: str, letters: Collection[str]) -> str:
    category, name = unicodedata.category(mark), unicodedata.name(mark, "")
    if category in SYMBOLS:
        return f" {name.removesuffix(' SIGN').replace('-', ' ').lower()} "
    if name.startswith("MODIFIER LETTER") or not (category.startswith("L") or category in NUMERALS):
        return mark
    plain = unicodedata.normalize("NFKC", mark).replace("\N{FRACTION SLASH}", "/")
    bare = "".join(part for part in unicodedata.normalize("NFD", plain) if not unicodedata.combining(part))
    for spelt in (plain, bare):
        if all(part.isascii() or part in letters for part in spelt):
            return spelt
    raise InvalidRequest(
        "the text has letters that are not Latin, and this voice reads English only",
        param="input",
        detail=f"{mark} is {name or 'no letter that Unicode names'}",
    )


def _by_digits(match: re.Match[str]) -> str:
    digits = match[0].replace(",", "")
    return " ".join(digits) if len(digits) > LONGEST_NUMBER else match[0]


def _in_parts(match: re.Match[str]) -> str:
    word = match[0]
    return " ".join(word[at : at + LONGEST_WORD] for at in range(0, len(word), LONGEST_WORD))


def _in_runs(match: re.Match[str]) -> str:
    """Cut after a mark if there is one, as in a long address."""
    rest, runs = match[0], []
    while len(rest) > LONGEST_RUN:
        marks = [mark.end() for mark in _MARK.finditer(rest, LONGEST_RUN // 2, LONGEST_RUN)]
        cut = marks[-1] if marks else LONGEST_RUN
        runs.append(rest[:cut])
        rest = rest[cut:]
    return " ".join([*runs, rest])
