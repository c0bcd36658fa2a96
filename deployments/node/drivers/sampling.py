"""The choice of the next token from its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LIKELY = 256  # sorting these is nearly always enough for top_p, and far cheaper than sorting all


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens.

    Args:
        temperature: 0 takes the likeliest token always.
        top_p: only the likeliest tokens that together reach this probability are drawn from.
    """

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        import torch

        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed % 2**63)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token, for logits of shape (vocabulary,)."""
        import torch

        if self._temperature == 0:
            return int(logits.argmax())
        likelihoods = torch.softmax(logits.float().cpu() / self._temperature, -1)
        if self._top_p >= 1:
            return int(torch.multinomial(likelihoods, 1, generator=self._generator))
        top, tokens = torch.topk(likelihoods, min(LIKELY, likelihoods.numel()))
        if float(top.sum()) < self._top_p:
            top, tokens = torch.sort(likelihoods, descending=True)
        within = top.cumsum(-1) - top < self._top_p  # the token that reaches top_p is the last one in
        return int(tokens[torch.multinomial(top * within, 1, generator=self._generator)])
