"""Embeddings with any text model in sentence-transformers' format.

Texts are made into tokens once, counted, and given to the network in batches of our own, which span
requests (`batcher.py`); `SentenceTransformer.encode` would cut what is too long without a word.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocks.errors import ContextLengthExceeded, InvalidRequest, LoadFailed, UpstreamFailed
from deployments.node.drivers.base import EmbeddingDriver, Vectors
from deployments.node.drivers.batcher import Batcher
from deployments.node.drivers.devices import memory_told, torch_device
from deployments.node.drivers.options import read_options
from deployments.node.drivers.weights import resolve

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*_Dense/pytorch_model.bin")
AT_ONCE = 64  # texts made into tokens between two looks at whether they are still wanted
# A text of more characters for each token of the context is refused unread: counting its tokens could
# take a hundred times its own memory.
CHARACTERS = 128
BATCH_TOKENS = {"cpu": 512, "cuda": 32_768}


class SentenceTransformersOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field("auto", description="cpu, cuda, cuda:1; auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the model's own on a GPU, float32 on a CPU"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: half of the cores")
    batch_tokens: int | None = Field(
        None, ge=1, description="tokens of a batch, padding included; default: 512 on a CPU, 32768 on a GPU"
    )
    prompt: str | None = Field(
        None, description="put before each text, such as 'passage: '; default: the model's default prompt"
    )
    dimensions: tuple[int, ...] = Field(
        (), description="shorter vectors that the model was trained to give (Matryoshka)"
    )


class SentenceTransformersDriver(EmbeddingDriver):
    """One embedding model. Counts `texts` and `batches` as well."""

    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "sentence_transformers",
        "transformers.models.bert.modeling_bert",
        "transformers.models.bert.tokenization_bert",
    )

    def load(self) -> None:
        self.options = read_options(self.model, SentenceTransformersOptions)
        try:
            import sentence_transformers  # noqa: F401
            import transformers
            from safetensors import SafetensorError
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'sentence-transformers' needs the package {error.name}; "
                "run `pip install 'smi[torch]'`"
            ) from error
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = torch_device(self.options.device, self.options.threads)
        try:
            with memory_told(f"model {self.model.name!r} does not fit into the memory of {device}"):
                self._load(device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise LoadFailed(f"model {self.model.name!r} cannot be loaded: {error}") from error
        kind = "cpu" if device == "cpu" else "cuda"
        self.batcher = Batcher(self._vectors, self.options.batch_tokens or BATCH_TOKENS[kind])

    def _load(self, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        folder = resolve(self.model, HUB_FILES)
        if not (folder / "modules.json").is_file():
            raise LoadFailed(
                f"model {self.model.name!r}: {folder} holds no sentence-transformers model (no modules.json)"
            )
        dtype = self.options.dtype
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        self.network: Any = SentenceTransformer(
            str(folder), device=device, model_kwargs={"dtype": dtype}, local_files_only=True
        )
        self.network.eval()
        self.prompt = self._prompt()
        self.tokenizer = self._tokenizer()
        self.context = self._context()
        self._token_ids(["warm"])  # and from here on the tokenizer's settings, which threads share, stay
        self.dimensions = int(self._vectors([self._token_ids(["warm"])[0]]).shape[1])
        if wrong := [size for size in self.options.dimensions if not 0 < size < self.dimensions]:
            raise LoadFailed(
                f"model {self.model.name!r}: option 'dimensions': {wrong[0]} is not between 0 and "
                f"{self.dimensions}, which its vectors have"
            )

    def _prompt(self) -> str:
        """What is put before each text, as the catalogue or the model has it."""
        name = self.network.default_prompt_name
        prompt = self.network.prompts[name] if name is not None else ""
        if self.options.prompt is not None:
            prompt = self.options.prompt
        if prompt and not all(getattr(module, "include_prompt", True) for module in self.network):
            raise LoadFailed(f"model {self.model.name!r} leaves its prompt out of its vectors: not supported")
        return str(prompt)

    def _tokenizer(self) -> Any:
        """The tokenizer of a model that reads plain text. Others (pictures, chats) are refused."""
        from sentence_transformers.base.modules import Transformer

        first = self.network[0]
        if not isinstance(first, Transformer) or set(first.modality_config) != {"text"}:
            raise LoadFailed(
                f"model {self.model.name!r} does not read plain text with a transformer; use one that does"
            )
        return first.tokenizer

    def _context(self) -> int:
        """Tokens that a text may have: the catalogue's `context`, or what the model was trained on."""
        positions = getattr(self.network[0].model.config, "max_position_embeddings", None)
        context = self.model.context or self.network.max_seq_length or positions
        if context is None:
            raise LoadFailed(f"model {self.model.name!r} does not say its context; set it in the catalogue")
        if positions is not None and context > positions:
            raise LoadFailed(
                f"model {self.model.name!r}: context = {context} is more than its {positions} positions"
            )
        return int(context)

    def unload(self) -> None:
        self.batcher.close()

    async def run(
        self, input: list[str], dimensions: int | None, cancelled: threading.Event
    ) -> AsyncIterator[Vectors]:
        self.counters["calls"] += 1
        size = self._size(dimensions)
        with self.counting(cancelled):
            texts = await self._tokens(input)
            rows = await self.batcher.rows(texts)
        tokens = sum(map(len, texts))
        self.counters["texts"] += len(texts)
        self.counters["tokens"] += tokens
        yield Vectors(rows if size == self.dimensions else _normalised(rows[:, :size]), tokens)

    def _size(self, asked: int | None) -> int:
        sizes = (self.dimensions, *self.options.dimensions)
        if asked is None or asked in sizes:
            return asked or self.dimensions
        raise InvalidRequest(
            f"model {self.model.name!r} has no vectors of {asked} dimensions; "
            f"give {' or '.join(map(str, sizes))}, or leave `dimensions` out",
            param="dimensions",
        )

    async def _tokens(self, texts: list[str]) -> list[Any]:
        """The tokens of each text: int32 arrays. Raises `ContextLengthExceeded` for the first too long."""
        found: list[Any] = []
        for start in range(0, len(texts), AT_ONCE):
            some = texts[start : start + AT_ONCE]
            for index, text in enumerate(some, start):
                if len(text) > CHARACTERS * self.context:
                    raise self._too_long(index, f"{len(text)} characters")
            found += await asyncio.to_thread(self._token_ids, some)
            for index in range(start, len(found)):
                if len(found[index]) > self.context:
                    raise self._too_long(index, f"{len(found[index])} tokens")
        return found

    def _too_long(self, index: int, size: str) -> ContextLengthExceeded:
        param = f"input[{index}]"
        return ContextLengthExceeded(
            f"{param!r} has {size}; model {self.model.name!r} takes texts of at most {self.context} tokens",
            param=param,
        )

    def _token_ids(self, texts: list[str]) -> list[Any]:
        import numpy

        found = self.tokenizer(
            [self.prompt + text for text in texts],
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [numpy.array(ids, numpy.int32) for ids in found["input_ids"]]

    def _vectors(self, texts: list[Any]) -> Any:
        """Vectors of length 1 of one batch: float32, (texts, dimensions). Runs in the batcher's thread."""
        import numpy
        import torch

        self.counters["batches"] += 1
        width = max(map(len, texts))
        tokens = numpy.full((len(texts), width), self.tokenizer.pad_token_id or 0, numpy.int64)
        mask = numpy.zeros_like(tokens)
        for row, ids in enumerate(texts):
            at = (
                slice(0, len(ids))
                if self.tokenizer.padding_side == "right"
                else slice(width - len(ids), width)
            )
            tokens[row, at], mask[row, at] = ids, 1
        features = {"input_ids": tokens, "attention_mask": mask}
        device = self.network.device
        full = f"model {self.model.name!r}: no memory left for this batch; lower its option 'batch_tokens'"
        with memory_told(full), torch.inference_mode():
            made = self.network({name: torch.from_numpy(at).to(device) for name, at in features.items()})
            vectors = made["sentence_embedding"].float().cpu().numpy()
        if not numpy.isfinite(vectors).all():
            raise UpstreamFailed(
                f"model {self.model.name!r} made a vector that contains NaN or infinity; "
                "set its option 'dtype' to float32"
            )
        return _normalised(vectors)


def _normalised(vectors: Any) -> Any:
    """Each row at length 1."""
    import numpy

    lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / numpy.maximum(lengths, numpy.finfo(numpy.float32).tiny)
