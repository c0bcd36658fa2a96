"""Chat with any causal language model that Hugging Face transformers loads and that has a chat template.

A GGUF file is turned once into safetensors, kept in the home folder's cache. The decode loop is our own,
because `generate` can neither be stopped within a step nor while it reads the prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocks.catalogue import Model
from blocks.errors import ContextLengthExceeded, InvalidRequest, LoadFailed
from deployments.node.drivers.base import ChatDriver, End, Piece, Prompt
from deployments.node.drivers.detokeniser import Detokeniser
from deployments.node.drivers.devices import memory_told, torch_device
from deployments.node.drivers.options import read_options
from deployments.node.drivers.prompt import Turn, prompt_tokens
from deployments.node.drivers.sampling import Sampler
from deployments.node.drivers.weights import cached, fingerprint, resolve
from tasks.protocol.shapes import ChatParameters

if TYPE_CHECKING:
    import torch

CHUNK = 256  # prompt tokens read at once
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class TransformersOptions(BaseModel):
    """The catalogue's `options` for this driver."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field("auto", description="cpu, cuda, cuda:1; auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the model's own on a GPU; on a CPU bfloat16 where it computes in it"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: half of the cores")
    temperature: float | None = Field(None, ge=0, le=2, description="where a request gives none")
    top_p: float | None = Field(None, gt=0, le=1, description="where a request gives none")


class TransformersDriver(ChatDriver):
    """One causal language model, one answer at a time."""

    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "transformers.generation",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    )

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._here = threading.local()  # the event of the answer that this thread makes

    def load(self) -> None:
        self.options = read_options(self.model, TransformersOptions)
        try:
            import torch  # noqa: F401
            import transformers
        except ImportError as error:
            raise LoadFailed(
                f"model {self.model.name!r}: driver 'transformers' needs the package {error.name}; "
                "run `pip install 'smi[torch]'`"
            ) from error
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = torch_device(self.options.device, self.options.threads)
        dtype: str = self.options.dtype
        if dtype == "auto" and device == "cpu":
            dtype = _fast_on_cpu()
        try:
            with memory_told(f"model {self.model.name!r} does not fit into the memory of {device}"):
                self._load(device, dtype)
        except (OSError, ValueError) as error:
            raise LoadFailed(f"model {self.model.name!r} cannot be loaded: {error}") from error

    def _load(self, device: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve(self.model, HUB_FILES)
        if folder.is_file():
            folder = _converted(folder, dtype)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise LoadFailed(f"model {self.model.name!r} has no chat template; use one made for conversation")
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.network = network.to(device).eval()
        for layer in self.network.get_decoder().layers:
            layer.register_forward_pre_hook(self._stop_here)
        configured = [self.model.context, self.network.config.get_text_config().max_position_embeddings]
        self.context = min(size for size in configured if size)
        self._ends = _end_tokens(self.network.generation_config.eos_token_id, self.tokenizer.eos_token_id)

    def _stop_here(self, *_: object) -> None:
        event: threading.Event | None = getattr(self._here, "cancelled", None)
        if event is not None and event.is_set():
            raise _Stopped

    def run(self, parameters: ChatParameters, cancelled: threading.Event) -> Iterator[Prompt | Piece | End]:
        self.counters["calls"] += 1
        prompt = self._tokens(parameters)
        limit = self._room(len(prompt), parameters.max_tokens)
        words = Detokeniser(self._text)
        stops = _Stops(parameters.stop or ())
        made, reason, last = 0, "length", None
        try:
            with self.counting(cancelled):
                yield Prompt(len(prompt))
                for token in self._decode(prompt, limit, self._sampler(parameters), cancelled):
                    if token in self._ends:
                        reason = "stop"
                        break
                    made += 1
                    self.counters["tokens"] += 1
                    held, text = words.held, words.feed(token)
                    if stops.reached(text):
                        reason, last = "stop", Piece(text, held + 1)
                        break
                    if text:
                        yield Piece(text, held + 1)
        except _Stopped:
            return
        if last is not None:
            yield last  # at which the adapter leaves, and that is no cancellation
        if words.held:
            held = words.held
            yield Piece(words.rest(), held)
        yield End(reason, len(prompt), made)

    def _decode(
        self, prompt: list[int], limit: int, choose: Sampler, cancelled: threading.Event
    ) -> Iterator[int]:
        """At most `limit` tokens that continue the prompt. Raises `_Stopped` once `cancelled` is set."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self.network.config)
        tokens = torch.tensor([prompt], device=self.network.device)
        *before, last = torch.split(tokens, CHUNK, 1)
        for chunk in before:
            self._step(chunk, cache, cancelled)
        for _ in range(limit):
            token = choose(self._step(last, cache, cancelled))
            yield token
            last = torch.tensor([[token]], device=self.network.device)

    def _step(self, tokens: torch.Tensor, cache: Any, cancelled: threading.Event) -> torch.Tensor:
        import torch

        self._here.cancelled = cancelled
        full = f"model {self.model.name!r}: no memory left for this conversation"
        try:
            with memory_told(full), torch.inference_mode():
                return self.network(input_ids=tokens, cache=cache, logits_to_keep=1).logits[0, -1]  # type: ignore[no-any-return]
        finally:
            self._here.cancelled = None

    def _tokens(self, parameters: ChatParameters) -> list[int]:
        from jinja2 import TemplateError

        turns: list[Turn] = [
            {"role": "system" if turn.role == "developer" else turn.role, "content": turn.content}
            for turn in parameters.messages
        ]
        try:
            return prompt_tokens(self.tokenizer, turns)
        except TemplateError as error:
            raise InvalidRequest(
                f"model {self.model.name!r} does not take these turns: {error.message}", param="messages"
            ) from None

    def _room(self, prompt: int, asked: int | None) -> int:
        room = self.context - prompt
        if room < (asked or 1):
            answer = f" and an answer of {asked}" if asked else ""
            raise ContextLengthExceeded(
                f"model {self.model.name!r} has a context of {self.context} tokens; "
                f"the conversation's {prompt} tokens{answer} do not fit",
                param="max_tokens" if asked and room > 0 else "messages",
            )
        return asked or room

    def _sampler(self, parameters: ChatParameters) -> Sampler:
        def first(*values: float | None) -> float:
            return next((value for value in values if value is not None), 1.0)

        temperature = first(parameters.temperature, self.options.temperature)
        return Sampler(temperature, first(parameters.top_p, self.options.top_p), parameters.seed)

    def _text(self, tokens: Any) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _Stopped(Exception):
    """The answer is not wanted any more."""


class _Stops:
    """Whether a stop sequence has been said. The adapter cuts it out; here it only ends the work."""

    def __init__(self, stops: tuple[str, ...] | list[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._tail = ""

    def reached(self, text: str) -> bool:
        self._tail = self._tail[-self._longest :] + text if self._longest else ""
        return any(stop in self._tail for stop in self._stops)


def _end_tokens(*given: int | list[int] | None) -> frozenset[int]:
    lists = (ids if isinstance(ids, list) else [ids] for ids in given)
    return frozenset(token for ids in lists for token in ids if token is not None)


def _fast_on_cpu() -> str:
    """bfloat16 only where the CPU computes in it: there it decodes 1.4 times as fast, elsewhere slower."""
    import torch

    has: Callable[[str], Any] = torch.cpu.get_capabilities().get
    return "bfloat16" if has("avx512_bf16") or has("amx_bf16") else "float32"


def _converted(gguf: Path, dtype: str) -> Path:
    """The folder of safetensors made from a GGUF file, in `dtype`."""

    def convert(folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
        ).save_pretrained(folder)

    return cached(f"{gguf.stem}-{dtype}-{fingerprint(gguf)}", convert)
