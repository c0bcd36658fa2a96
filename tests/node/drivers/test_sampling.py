"""deployments/node/drivers/sampling.py: the tokens drawn follow the distribution asked for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from deployments.node.drivers.sampling import LIKELY, Sampler

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def drawn(sampler: Sampler, logits: torch.Tensor = LOGITS, times: int = 2000) -> dict[int, float]:
    return {token: n / times for token, n in Counter(sampler(logits) for _ in range(times)).items()}


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(Sampler(0, 1, None), times=20) == {1: 1.0}


def test_temperature_one_draws_as_the_model_says() -> None:
    assert drawn(Sampler(1, 1, 5)) == pytest.approx({0: 0.05, 1: 0.5, 2: 0.15, 3: 0.3}, abs=0.04)


def test_a_higher_temperature_flattens() -> None:
    expected = torch.softmax(LOGITS / 2, -1).tolist()
    assert drawn(Sampler(2, 1, 5)) == pytest.approx(dict(enumerate(expected)), abs=0.04)


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    assert drawn(Sampler(1, 0.7, 5)) == pytest.approx({1: 0.5 / 0.8, 3: 0.3 / 0.8}, abs=0.04)
    assert drawn(Sampler(1, 0.01, 5), times=20) == {1: 1.0}


def test_top_p_over_more_tokens_than_are_sorted_first() -> None:
    flat = torch.zeros(LIKELY * 8)
    assert len(drawn(Sampler(1, 0.5, 5), flat, times=4000)) > LIKELY * 2


def test_the_seed_decides() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(1, 0.9, seed)
        return [sampler(LOGITS) for _ in range(50)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)
    assert tokens(-1) == tokens(-1)
