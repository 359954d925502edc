"""B09: a uniform draw rounded to 1 gave infinite noise, NaN on a masked logit, and an id outside the vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from modelrunner.kernels.sampling import gumbel_noise

MASKED_ID = 11
ENDS = [0.0, 2.0**-149, 0.5, 1.0 - 2.0**-24, 1.0]
PAIRS = list(itertools.product(ENDS, ENDS))
vocabularies = pytest.mark.parametrize("vocab", [331, 163840])


def masked_logits(vocab: int, *ids: int) -> torch.Tensor:
    logits = torch.full((vocab,), -math.inf)
    logits[list(ids)] = 0.0
    return logits


Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def draw(
    sample: Sample, logits: torch.Tensor, uniforms: torch.Tensor | None = None, first_seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    n = logits.shape[0]
    zeros = torch.zeros(n, dtype=torch.int64)
    return sample(logits, torch.ones(n), None, None, None, torch.arange(first_seed, first_seed + n), zeros, zeros, uniforms)


def injected(vocab: int) -> torch.Tensor:
    """A row for each pair: the first number at id 7, the second at a masked id, ordinary ones elsewhere."""
    uniforms = torch.rand(len(PAIRS), vocab)
    uniforms[:, 7], uniforms[:, MASKED_ID] = torch.tensor(PAIRS).T
    return uniforms


@vocabularies
def test_one_token_left_is_always_drawn(sample: Sample, vocab: int) -> None:
    tokens, ok = draw(sample, masked_logits(vocab, 7).expand(len(PAIRS), -1), injected(vocab))
    assert tokens.tolist() == [7] * len(PAIRS)
    assert ok.all()


@vocabularies
def test_two_tokens_left(sample: Sample, vocab: int) -> None:
    tokens, ok = draw(sample, masked_logits(vocab, 7, 9).expand(len(PAIRS), -1), injected(vocab))
    assert set(tokens.tolist()) == {7, 9}
    assert ok.all()


@vocabularies
def test_no_token_left_is_an_error_of_that_row_only(sample: Sample, vocab: int) -> None:
    """Every other row is all masked; the rows between them stay right."""
    logits = masked_logits(vocab, 7).repeat(len(PAIRS), 1)
    logits[::2] = -math.inf
    tokens, ok = draw(sample, logits, injected(vocab))
    assert ok.tolist() == [row % 2 == 1 for row in range(len(PAIRS))]
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert (tokens[1::2] == 7).all()


def test_the_ends_give_finite_noise() -> None:
    noise = gumbel_noise(*[torch.zeros(1, dtype=torch.int64)] * 3, 0, len(ENDS), torch.tensor([ENDS]))
    assert torch.isfinite(noise).all()
    assert noise[0].tolist() == sorted(noise[0].tolist())


def test_a_million_ordinary_draws(sample: Sample) -> None:
    """Half each. Noise depends on seed and id, not on the vocabulary's size, so a small one shows the same draws; that is checked first."""
    small, whole = masked_logits(12, 7, 9), masked_logits(331, 7, 9)
    tokens, _ = draw(sample, small.expand(1_000_000, -1))
    assert torch.equal(tokens[:5000], draw(sample, whole.expand(5000, -1))[0])
    sevens, nines = (tokens == 7).sum().item(), (tokens == 9).sum().item()
    assert sevens + nines == 1_000_000
    assert sevens / 1_000_000 == pytest.approx(0.5, abs=0.003)
