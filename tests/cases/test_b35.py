"""B35: the draft and its replacement shared their noise, so the token in place of a rejected draft was biased: 63% where 60% was due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_world import certain, drawn
from verify_world import DEVICE, ROWS, Draft, K, Verify, World, drawing, verifiers

from modelrunner import SamplingParams
from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT
from modelrunner.kernels.verification import reference
from modelrunner.testing import Driver, EngineProbe, P, Subject, constant, scripted

TARGET = torch.tensor([0.15, 0.50, 0.35])
Q1, Q2 = torch.tensor([0.65, 0.05, 0.30]), torch.tensor([0.55, 0.35, 0.10])
KEPT = torch.tensor([0.0, 0.50, 0.35]) / 0.85  # by top_k 2


def single(token: int) -> Draft:
    """One-hot q, without probabilities."""
    return lambda world, newest: (torch.full((len(newest), K), token, dtype=torch.int32, device=DEVICE), None)


DRAFTERS: dict[str, Draft] = {
    "q1": drawing(Q1),
    "q2": drawing(Q2),
    "q = p": drawing(TARGET),
    **{f"one-hot {token}": drawing(torch.eye(3)[token]) for token in range(3)},
    **{f"certain {token}": single(token) for token in range(3)},
}
WORLDS: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "": ({}, TARGET),
    "top_k 2": ({"top_k": 2}, KEPT),
    "one seed": ({"seed": torch.full((ROWS,), 5)}, TARGET),
}


def world_of(given: dict[str, Any]) -> World:
    """Rows of their own seeds, or of one seed at positions of their own."""
    world = World(TARGET.log().expand(3, -1), **given)
    if "seed" in given:
        world.choice = world.rows  # the same for the noise as positions of their own: another word of the counter
    return world


def check(world: World, chance: torch.Tensor) -> None:
    """The first two tokens: how often each comes, and each pair; a chi-square of independence at 1e-4."""
    first, second = world.tokens[:, 1].cpu(), world.tokens[:, 2].cpu()
    for tokens in (first, second):
        assert torch.allclose(torch.bincount(tokens, minlength=3) / len(tokens), chance, atol=0.005)
    pairs = torch.bincount(first * 3 + second, minlength=9).view(3, 3).double()
    pairs = pairs[pairs.sum(1) > 0][:, pairs.sum(0) > 0]
    expected = pairs.sum(1, keepdim=True) * pairs.sum(0, keepdim=True) / pairs.sum()
    limit = {4: 23.52, 1: 15.14}[(pairs.shape[0] - 1) * (pairs.shape[1] - 1)]
    assert ((pairs - expected) ** 2 / expected).sum().item() < limit


RUNS = [(drafter, "") for drafter in DRAFTERS] + [(drafter, name) for drafter in ("q1", "q2", "certain 2") for name in WORLDS if name]


@pytest.mark.parametrize(("drafter", "setting"), RUNS)
@pytest.mark.parametrize("verify", verifiers(), ids=lambda f: f.__module__.rpartition(".")[2])
def test_tokens_follow_the_target(verify: Verify, drafter: str, setting: str) -> None:
    given, chance = WORLDS[setting]
    check(world_of(given).run(verify, DRAFTERS[drafter]), chance)


@pytest.mark.parametrize("verify", verifiers(), ids=lambda f: f.__module__.rpartition(".")[2])
def test_as_much_is_accepted_as_p_and_q_have_in_common(verify: Verify) -> None:
    for drafter, share in (("q1", 0.50), ("q2", 0.60), ("q = p", 1.0)):
        world = world_of({})
        world.verify(verify, *DRAFTERS[drafter](world, world.newest))
        assert world.accepted / world.drafted == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("drafter", ["q1", "q2"])
def test_the_fault_is_found(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PURPOSE_RECOVER", PURPOSE_DRAFT)
    with pytest.raises(AssertionError):
        check(world_of({}).run(reference.verify_drafts, DRAFTERS[drafter]), TARGET)


SUBJECT = scripted(constant(torch.cat((torch.full((40,), -1e4), TARGET.log(), torch.full((288,), -1e4)))), "three")
ENGINES: dict[str, tuple[Subject, float]] = {
    **{f"certain {token}": (certain(40 + token, SUBJECT), TARGET[token].item()) for token in range(3)},
    "q1": (drawn(dict(enumerate(Q1.tolist(), 40)), SUBJECT), 0.50),
    "q2": (drawn(dict(enumerate(Q2.tolist(), 40)), SUBJECT), 0.60),
    "q = p": (drawn(dict(enumerate(TARGET.tolist(), 40)), SUBJECT), 1.0),
}


@pytest.mark.parametrize("drafter", [pytest.param(name, marks=pytest.mark.slow) if "q" in name else name for name in ENGINES])
def test_through_the_engine(drafter: str, device: str) -> None:
    """5,000 requests of four tokens."""
    subject, share = ENGINES[drafter]
    name = "script" if "certain" in drafter else "drawing"
    driver = Driver(subject.engine(device=device, rows=256, tokens=2048, drafter=name, drafts=K, prefix=False))
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=500)
    for i in range(10):
        driver.add(str(i), P(6, i), params.model_copy(update={"seed": i}))
    driver.finish()
    outputs = torch.tensor([choice.token_ids for i in range(10) for choice in driver.final(str(i)).outputs]) - 40
    assert outputs.shape == (5000, 4)
    for place in range(4):
        assert torch.allclose(torch.bincount(outputs[:, place], minlength=3) / 5000, TARGET, atol=0.03)
    stats = driver.engine.scheduler.stats
    assert stats.num_drafted > 5000
    assert stats.accepted_at[0] / stats.drafted_at[0] == pytest.approx(share, abs=0.03)
    EngineProbe(driver).assert_clean()
