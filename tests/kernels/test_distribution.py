"""What is drawn, over 200,000 draws: the exact distribution, and nothing in common between rows, positions, choices and seeds.

On a GPU by its kernels too; in Triton's interpreter so many draws would take hours. The kept tokens and their probabilities are those of
transformers' own logits processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chi_square import assert_fits
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from triton_world import DEVICE, ON_GPU

from modelrunner.kernels.sampling import reference

DRAWS = 200_000
Sampler = Callable[..., tuple[torch.Tensor, torch.Tensor]]
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 12},
    {"temperature": 1.3, "min_p": 0.01, "top_k": 30, "top_p": 0.95},
]


def samplers() -> list[Sampler]:
    """The reference, and on a GPU the kernels."""
    if not ON_GPU:
        return [reference.sample]
    from modelrunner.kernels.sampling.gpu import OVERRIDES

    return [reference.sample, OVERRIDES["sample"]]


each_sampler = pytest.mark.parametrize("sample", samplers(), ids=lambda f: f.__module__.rpartition(".")[2])


def logits_of(vocab: int) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2


def draw(sample: Sampler, logits: torch.Tensor, *, seed: Any = 0, position: Any = 0, choice: Any = 0, **given: float) -> torch.Tensor:
    """DRAWS tokens [DRAWS] int64 from logits [V]; seed, position and choice: numbers, or one for each draw."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        made = value if isinstance(value, torch.Tensor) else torch.full((DRAWS,), value)
        return made.to(DEVICE, dtype)

    filters = [column(given[name], torch.int32 if name == "top_k" else torch.float32) if name in given else None for name in FILTERS]
    keys = column(seed, torch.int64), column(position, torch.int32), column(choice, torch.int32)
    rows = logits.to(DEVICE).expand(DRAWS, -1).contiguous()
    tokens, ok = sample(rows, column(given.get("temperature", 1.0), torch.float32), *filters, *keys)
    assert ok.all()
    return tokens.cpu()


FILTERS = ("top_k", "top_p", "min_p")
COUNTING = torch.arange(DRAWS)


def probabilities(logits: torch.Tensor, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """float32 [V] by transformers' processors, in our order."""
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    steps: list[Any] = [TemperatureLogitsWarper(temperature)]
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0]


# One group of tokens; three, of which the last is not full.
@pytest.mark.parametrize(("vocab", "given"), [*((50, given) for given in MIXES), *((300, MIXES[i]) for i in (0, 4, 5))], ids=str)
@each_sampler
def test_draws_follow_the_distribution(sample: Sampler, vocab: int, given: dict[str, Any]) -> None:
    logits = logits_of(vocab)
    counts = torch.bincount(draw(sample, logits, seed=COUNTING, **given), minlength=vocab)
    assert_fits(counts, probabilities(logits, **given) * DRAWS)


@each_sampler
def test_groups_of_unlike_mass(sample: Sampler) -> None:
    """Much of the mass in many small tokens of one group, the rest in one token of another and in masked groups nothing."""
    logits = torch.full((400,), -math.inf)
    logits[130:250], logits[300], logits[301:360] = torch.linspace(-4.5, -3.5, 120), 0.5, -14.0
    for given in ({}, {"top_p": 0.9}, {"min_p": 0.012}):
        counts = torch.bincount(draw(sample, logits, seed=COUNTING, **given), minlength=400)
        assert_fits(counts, probabilities(logits, **given) * DRAWS)


@pytest.mark.parametrize("given", MIXES, ids=str)
def test_distributions_are_those_of_transformers(given: dict[str, Any]) -> None:
    """Within 1e-5 in float32, over vocabularies that are sorted and ones that are searched by digits."""
    for vocab in (50, 331, 5000):
        logits = logits_of(vocab)[None]
        temperature = torch.tensor([given.get("temperature", 1.0)])
        columns = [torch.tensor([given[name]]) if name in given else None for name in FILTERS]
        distance = reference.scaled_distance(logits, logits.argmax(-1), temperature)
        cut = reference.filter_cut(distance, *columns)
        kept = distance if cut is None else distance.masked_fill(distance > cut[:, None], math.inf)
        torch.testing.assert_close(kept.neg().softmax(-1)[0], probabilities(logits[0], **given), rtol=0, atol=1e-5)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows of following seeds": ({"seed": COUNTING}, {"seed": COUNTING + 1}),
    "seeds in the upper word": ({"seed": COUNTING}, {"seed": COUNTING + 2**32}),
    "positions": ({"seed": COUNTING, "position": 7}, {"seed": COUNTING, "position": 8}),
    "positions of one seed": ({"position": COUNTING}, {"position": COUNTING + 1}),
    "choices": ({"seed": COUNTING, "choice": 0}, {"seed": COUNTING, "choice": 1}),
    "choice and position": ({"position": COUNTING, "choice": 1}, {"position": COUNTING + 1, "choice": 0}),
}


@pytest.mark.parametrize("pair", PAIRS)
@each_sampler
def test_draws_have_nothing_in_common(sample: Sampler, pair: str) -> None:
    """The pairs of tokens are as often as the product of their probabilities says."""
    assert_unrelated(logits_of(8), *(draw(sample, logits_of(8), **keys) for keys in PAIRS[pair]))


@pytest.mark.parametrize("pair", ["rows of following seeds", "positions"])
@each_sampler
def test_draws_of_groups_have_nothing_in_common(sample: Sampler, pair: str) -> None:
    """The same of three tokens, each in a group of its own."""
    logits, few = torch.full((257,), -math.inf), logits_of(3)
    logits[::128] = few
    assert_unrelated(few, *(draw(sample, logits, **keys) // 128 for keys in PAIRS[pair]))


def assert_unrelated(logits: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """first, second: [DRAWS] tokens."""
    chance, vocab = probabilities(logits), logits.shape[0]
    counts = torch.bincount(first * vocab + second, minlength=vocab**2)
    assert_fits(counts, (chance[:, None] * chance[None, :]).flatten() * DRAWS)


def test_a_wrong_distribution_is_noticed() -> None:
    """Or else these tests could not fail: a temperature 2% off, and pairs that are one draw."""
    logits = logits_of(50)
    tokens = draw(reference.sample, logits, seed=COUNTING, temperature=1.02)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_fits(torch.bincount(tokens, minlength=50), probabilities(logits) * DRAWS)
    few = logits_of(8)
    same = draw(reference.sample, few, seed=COUNTING)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_fits(
            torch.bincount(same * 8 + same, minlength=64), (probabilities(few)[:, None] * probabilities(few)[None]).flatten() * DRAWS
        )
