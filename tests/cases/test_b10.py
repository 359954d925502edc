"""B10: requests without a seed shared one noise stream, so independent requests gave identical 'random' answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, Subject, constant, scripted

EQUAL_IDS, VOCAB, TOKENS = 300, 331, 8


Sample = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def answers(sample: Sample, seeds: list[int], choices: list[int]) -> list[tuple[int, ...]]:
    """Eight tokens per (seed, choice) at positions 5 to 12, from equal logits on 300 ids, one row at a time."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :EQUAL_IDS] = 0.0
    found = []
    for seed, choice in zip(seeds, choices, strict=True):
        arguments = (
            torch.ones(TOKENS),
            None,
            None,
            None,
            torch.full((TOKENS,), seed),
            torch.arange(5, 5 + TOKENS),
            torch.full((TOKENS,), choice),
        )
        tokens, ok = sample(logits.expand(TOKENS, -1), *arguments)
        assert ok.all()
        found.append(tuple(tokens.tolist()))
    return found


def test_other_seeds_are_other_streams(sample: Sample) -> None:
    """Adjacent seeds, and seeds that differ in the high word only."""
    seeds = [*range(30), *(1 << shift for shift in range(5, 63)), -1, -(2**63)]
    found = answers(sample, seeds, [0] * len(seeds))
    assert all(a != b for a, b in combinations(found, 2))
    assert max(len(set(answer)) for answer in found) == TOKENS


def test_choices_of_one_seed_are_other_streams_and_repeat(sample: Sample) -> None:
    first, second = answers(sample, [5] * 16, list(range(16))), answers(sample, [5] * 16, list(range(16)))
    assert first == second
    assert all(a != b for a, b in combinations(first, 2))


def test_tokens_are_uniform_over_seeds(sample: Sample) -> None:
    """Chi-square of 6,000 first tokens over 300 equal ids, at the 1e-4 level."""
    n = 6000
    logits = torch.full((VOCAB,), -torch.inf)
    logits[:EQUAL_IDS] = 0.0
    zeros = torch.zeros(n, dtype=torch.int64)
    tokens, _ = sample(logits.expand(n, -1), torch.ones(n), None, None, None, torch.arange(n), zeros, zeros)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert counts[EQUAL_IDS:].sum() == 0
    assert ((counts[:EQUAL_IDS] - n / EQUAL_IDS) ** 2 / (n / EQUAL_IDS)).sum().item() < 395.0  # 299 degrees of freedom: 1e-4 at 394.9


EQUAL = torch.full((VOCAB,), -1e4)
EQUAL[:EQUAL_IDS] = 0.0


def equal(drafts: int) -> Subject:
    """With a drafter of ids of which one in three hundred holds, and of some that cannot."""
    subject = scripted(constant(EQUAL), "equal")
    if not drafts:
        return subject
    plugin = ScriptDrafterPlugin(lambda request: [7, 310, 9, 11, 12, 310, 14, 15])
    return replace(subject, plugins=(*subject.plugins, plugin))


def speculation(drafts: int) -> dict[str, Any]:
    return {"drafter": "script", "drafts": drafts} if drafts else {}


FREE = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_without_a_seed_and_choices_are_independent(drafts: int, device: str) -> None:
    """Thirty requests one after the other, and sixteen choices of one; a seed repeats all sixteen, in their order."""
    driver = Driver(equal(drafts).engine(device=device, rows=16, **speculation(drafts)))
    for i in range(30):
        driver.add(f"r{i}", P(12, 1), FREE)
        driver.finish()
    for name, params in (("free", FREE), ("one", FREE.model_copy(update={"seed": 5})), ("two", FREE.model_copy(update={"seed": 5}))):
        driver.add(name, P(12, 1), params.model_copy(update={"n": 16}))
        driver.finish()
    single = [tuple(driver.result(f"r{i}").token_ids) for i in range(30)]
    free, one, two = ([tuple(choice.token_ids) for choice in driver.final(name).outputs] for name in ("free", "one", "two"))
    assert [len(set(group)) for group in (single, free, one)] == [30, 16, 16]
    assert one == two
    assert [choice.text for choice in driver.final("one").outputs] == [choice.text for choice in driver.final("two").outputs]
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_of_choices_are_uniform(drafts: int) -> None:
    """Chi-square over 300 equal ids in 30 bins of ten, at the 1e-4 level; of the first token and, with drafts, of the later ones."""
    driver = Driver(equal(drafts).engine(rows=64, **speculation(drafts)))
    driver.add("many", P(12, 1), FREE.model_copy(update={"n": 600, "max_tokens": 5 if drafts else 1}))
    driver.finish()
    for place in range(5 if drafts else 1):
        found = torch.tensor([choice.token_ids[place] // 10 for choice in driver.final("many").outputs])
        counts = torch.bincount(found, minlength=30).double()
        assert ((counts - 20) ** 2 / 20).sum().item() < 66.2  # 29 degrees of freedom: 1e-4 at 66.15
