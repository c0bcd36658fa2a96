"""Documents in chunks: nothing lost, offsets exact, sizes kept."""

from __future__ import annotations

import random
import re
import time
from itertools import pairwise

import pytest

from blocks.vectors import Chunk
from tasks.chunks import OVERLAP, SIZE, chunked, embedded, size_for, split
from tasks.protocol.shapes import Page


def words_of(text: str, chunks: list[Chunk]) -> str:
    """The text that the chunks of one page cover, each place once, without white space."""
    seen = [False] * len(text)
    for chunk in chunks:
        seen[chunk.start : chunk.end] = [True] * (chunk.end - chunk.start)
    return "".join(letter for letter, was in zip(text, seen, strict=True) if was and not letter.isspace())


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    pieces = [
        "word ",
        "Ein Satz. ",
        "\n\n",
        "\n",
        "# Title\n",
        "## Sub\n\n",
        "```\n",
        "日本語。",
        "é",
        "!? ",
        "x" * 300,
    ]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, 400)))


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_offsets_are_exact_and_sizes_are_kept(seed: int) -> None:
    text = random_text(seed)
    chunks = chunked([Page(number=1, text=text)], markdown=seed % 2 == 0, size=200, overlap=40)
    assert words_of(text, chunks) == re.sub(r"\s", "", text)
    for number, chunk in enumerate(chunks):
        assert chunk.number == number
        assert chunk.text == text[chunk.start : chunk.end]
        assert 0 < len(chunk.text) <= 200
        assert chunk.text == chunk.text.strip()
    for before, after in pairwise(chunks):
        assert before.start < after.start
        assert before.end < after.end
        assert before.end - after.start <= 40


def test_markdown_is_cut_at_headings_which_are_kept_as_a_path() -> None:
    text = "# Sea\n\n## Tides\n\nIt rises.\n\n```\n# no heading\n```\n\n## Salt\nIt is salty.\n# Land\nDry.\n"
    chunks = chunked([Page(number=1, text=text)], markdown=True)
    assert [chunk.heading for chunk in chunks] == ["Sea > Tides", "Sea > Salt", "Land"]
    assert chunks[0].text.startswith("# Sea\n\n## Tides")
    assert "# no heading" in chunks[0].text
    assert embedded(chunks[1]) == "Sea\n## Salt\nIt is salty."
    assert [chunk.heading for chunk in chunked([Page(number=1, text=text)], markdown=False)] == [""]


def test_pages_are_kept_apart_and_empty_ones_make_no_chunk() -> None:
    pages = [Page(number=1, text="One."), Page(number=2, text=" \n "), Page(number=3, text="Three.")]
    assert [(chunk.page, chunk.text) for chunk in chunked(pages, False)] == [(1, "One."), (3, "Three.")]


def test_chunks_of_a_section_overlap_by_whole_sentences() -> None:
    text = " ".join(f"Sentence number {number} is here." for number in range(100))
    chunks = chunked([Page(number=1, text=text)], False)
    assert len(chunks) > 3
    for before, after in pairwise(chunks):
        assert after.text.startswith("Sentence")
        assert 0 < before.end - after.start <= OVERLAP


def test_a_chunk_is_split_in_two_until_it_cannot_be() -> None:
    chunk = Chunk(number=7, page=2, start=100, end=109, heading="H", text="four five")
    pieces = split(chunk)
    assert [(piece.start, piece.end, piece.text) for piece in pieces] == [
        (100, 104, "four"),
        (105, 109, "five"),
    ]
    assert {piece.number for piece in pieces} == {7}
    single = Chunk(number=0, page=1, start=3, end=4, heading="", text="a")
    assert split(single) == [single]


def test_sizes_follow_the_model() -> None:
    assert size_for(None) == size_for(8192) == SIZE
    assert size_for(128) == 409


@pytest.mark.parametrize(
    "text",
    [
        "# a" + " " * 1_000_000 + "x",
        "# a" + " #" * 500_000 + "x",
        "# a" + "\t" * 1_000_000,
        "# " + "t" * 1_000_000 + "\n" + "## s\n" * 20_000 + "b",
        "a\n" + " " * 1_000_000 + "b",
        "a." + '"' * 1_000_000 + "b",
    ],
    ids=["spaces", "hashes", "tabs", "under a long heading", "a blank line", "quotes"],
)
def test_no_text_takes_longer_than_its_length_says(text: str) -> None:
    """A line of 80 kB froze the API for 26 s."""
    began = time.process_time()
    assert chunked([Page(number=1, text=text)], markdown=True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("# Tides ##  ", "Tides"),
        ("#\t Tides", "Tides"),
        ("# C# and #5\r", "C# and #5"),
        ("###### Tides", "Tides"),
        ("#Tides", ""),
        ("####### Tides", ""),
        ("# " + "t" * 1000 + "e", "t" * 159 + "e"),
    ],
)
def test_a_heading_is_what_stands_after_its_marks(line: str, heading: str) -> None:
    assert chunked([Page(number=1, text=f"{line}\nIt rises.")], markdown=True)[0].heading == heading


def test_no_more_chunks_are_made_than_are_wanted() -> None:
    text = "A sentence of some words. " * 1000
    whole = chunked([Page(number=1, text=text)], markdown=False)
    assert chunked([Page(number=1, text=text)], markdown=False, most=3) == whole[:3]
