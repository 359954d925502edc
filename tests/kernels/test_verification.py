"""What verification keeps: the target's distribution over 200,000 rows whatever is proposed, every place by itself, greedy rows exactly."""

from __future__ import annotations

import pytest
import torch
from chi_square import assert_fits
from verify_world import DEVICE, LENGTH, ROWS, Draft, K, Verify, World, drawing, lines_of, verifiers

from modelrunner.kernels.logprobs.reference import processed_logits
from modelrunner.kernels.sampling import sample
from modelrunner.kernels.sampling.philox import PURPOSE_DRAFT
from modelrunner.kernels.verification import reference

VOCAB = 5
# Logits of the token after each token: one far ahead, one impossible, some near each other.
MODEL = torch.tensor(
    [[0.0, 1.0, -1.0, 0.5, -torch.inf], [2.0, 0.0, 0.1, 0.2, -2.0], [0.0] * 5, [-1.0, 4.0, 0.0, 0.3, 1.0], [0.5, -0.5, 1.5, 0.0, -1.0]]
)
each_verifier = pytest.mark.parametrize("verify", verifiers(), ids=lambda f: f.__module__.rpartition(".")[2])


def assert_right(world: World) -> None:
    """The first three tokens together: every pair and every place, and what each says of the next."""
    scores = {name: None if column is None else column[:VOCAB] for name, column in world.columns.items()}
    chance = processed_logits(world.model, **scores).softmax(-1).cpu().double()  # type: ignore[arg-type]
    together = chance[0][:, None, None] * chance[:, :, None] * chance[None, :, :]
    first, second, third = world.tokens[:, 1 : 1 + LENGTH].cpu().unbind(1)
    assert_fits(torch.bincount((first * VOCAB + second) * VOCAB + third, minlength=VOCAB**3), together.flatten() * len(world.rows))


# ---- drafters ----------------------------------------------------------------------------------------------------------


def always(token: int) -> Draft:
    return lambda world, newest: (torch.full((len(newest), K), token, dtype=torch.int32, device=DEVICE), None)


def likeliest(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, None]:
    found = [newest]
    for _ in range(K):
        found.append(world.model.argmax(-1)[found[-1]])
    return torch.cat(found[1:], 1).int(), None


def foresight(share: float) -> Draft:
    """Knows what a row would draw without drafts, and proposes it with probability `share`, at each place; else the next id."""

    def draft(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = torch.Generator().manual_seed(int(world.known.sum()))
        found, size = [newest], len(world.model)
        for j in range(K):
            drawn, _ = sample(world.model[found[-1][:, 0]], **world.columns, seed=world.seed, position=world.known + j, choice=world.choice)  # type: ignore[arg-type]
            right = (torch.rand(len(newest), generator=own) < share).to(DEVICE)
            found.append(torch.where(right, drawn, (drawn + 1) % size).unsqueeze(1))
        return torch.cat(found[1:], 1).int(), None

    return draft


def ragged(draft: Draft) -> Draft:
    """Rows with no draft to K, and what was proposed of those left out."""

    def fewer(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafts, probs = draft(world, newest)
        return torch.where(torch.arange(K, device=DEVICE) < world.rows.unsqueeze(1) % (K + 1), drafts, -1), probs

    return fewer


UNLIKE = torch.tensor(
    [[0.6, 0.1, 0.1, 0.1, 0.1], [0.1, 0.0, 0.7, 0.1, 0.1], [0.0, 0.0, 0.0, 0.0, 1.0], [0.2] * 5, [0.3, 0.3, 0.0, 0.2, 0.2]]
)
DRAFTERS: dict[str, Draft] = {
    "an impossible token": always(4),
    "one token": always(1),
    "the likeliest": likeliest,
    "right in 0%": foresight(0.0),
    "right in 30%": foresight(0.3),
    "right in 80%": foresight(0.8),
    "right in all": foresight(1.0),
    "drawn, unlike": drawing(UNLIKE),
    "drawn, alike": drawing(MODEL.softmax(-1)),
    "drawn, flat": drawing(torch.full((VOCAB,), 0.2)),
    "drawn, certain": drawing(torch.eye(VOCAB)[1]),
    "ragged": ragged(likeliest),
    "ragged, drawn": ragged(drawing(UNLIKE)),
}
FILTERS: list[dict[str, float]] = [
    {"temperature": 0.6},
    {"temperature": 1.8, "top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 4, "top_p": 0.9},
]


@pytest.mark.parametrize("drafter", DRAFTERS)
@each_verifier
def test_the_distribution_is_the_targets(verify: Verify, drafter: str) -> None:
    assert_right(World(MODEL).run(verify, DRAFTERS[drafter]))


@pytest.mark.parametrize("drafter", ["the likeliest", "drawn, unlike"])
@pytest.mark.parametrize("given", FILTERS, ids=str)
@each_verifier
def test_the_distribution_is_the_filtered_one(verify: Verify, given: dict[str, float], drafter: str) -> None:
    assert_right(World(MODEL, **given).run(verify, DRAFTERS[drafter]))


@each_verifier
def test_rows_of_one_seed_at_other_positions_are_independent(verify: Verify) -> None:
    world = World(MODEL, seed=torch.full((ROWS,), 11))
    world.choice = world.rows
    assert_right(world.run(verify, drawing(UNLIKE)))


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if "drawn" not in name])
@each_verifier
def test_tokens_are_those_without_a_drafter(verify: Verify, drafter: str) -> None:
    """Of drafters without probabilities: seed for seed."""

    def none(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.full((len(newest), K), -1, dtype=torch.int32, device=DEVICE), None

    plain, drafted = (World(MODEL, 3000, top_k=4, temperature=1.2).run(verify, each) for each in (none, DRAFTERS[drafter]))
    assert torch.equal(plain.tokens[:, : 1 + LENGTH], drafted.tokens[:, : 1 + LENGTH])


@each_verifier
def test_how_much_is_accepted(verify: Verify) -> None:
    """The overlap of p and q (Leviathan et al. 2023, corollary 3.6); all where both are equal."""
    for proposed, model in ((UNLIKE, MODEL), (MODEL.softmax(-1), MODEL)):
        world = World(model)
        world.verify(verify, *drawing(proposed)(world, world.newest))
        overlap = torch.minimum(model[0].softmax(-1), proposed[0]).sum().item()
        assert world.accepted / world.drafted == pytest.approx(overlap, abs=0.005)


@pytest.mark.parametrize("shared", ["PURPOSE_RECOVER", "PURPOSE_ACCEPT"])
def test_noise_that_is_shared_is_noticed(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else these tests could not fail: acceptance or recovery by the noise that the draft was drawn by."""
    monkeypatch.setattr(reference, shared, PURPOSE_DRAFT)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_right(World(MODEL).run(reference.verify_drafts, DRAFTERS["drawn, unlike"]))


def test_a_drafter_that_misstates_its_probabilities_is_noticed() -> None:
    def draft(world: World, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return drawing(UNLIKE)(world, newest)[0], drawing(UNLIKE.roll(1, 1))(world, newest)[1]

    with pytest.raises(AssertionError, match="chi-square"):
        assert_right(World(MODEL).run(reference.verify_drafts, draft))


@pytest.mark.parametrize("drafter", DRAFTERS)
@each_verifier
def test_greedy_rows_take_the_best_token_at_each_place(verify: Verify, drafter: str) -> None:
    """With and without a temperature in the step; drafts hold while they are the best tokens."""
    for columns in ({"temperature": 0.0}, None):
        world = World(MODEL, 64, **(columns or {}))
        if columns is None:
            world.columns = dict.fromkeys(world.columns)
        drafts, probs = DRAFTERS[drafter](World(MODEL, 64), world.newest)
        counts = world.verify(verify, drafts, probs if columns else None)
        best = [0]
        for _ in range(K + 1):
            best.append(int(MODEL[best[-1]].argmax()))
        want = torch.tensor(best[1 : 1 + K], dtype=torch.int32, device=DEVICE)
        holding = (drafts == want).int().cumprod(1).sum(1)
        assert torch.equal(counts, holding.int() + 1)
        for row, count in zip(world.tokens.tolist(), counts.tolist(), strict=True):
            assert row[1 : 1 + count] == best[1 : 1 + count]


@each_verifier
def test_runs_end_before_a_place_without_a_token(verify: Verify) -> None:
    """Nothing finite at slot 0 is an error; behind it, it is left to the step that begins there. Rows that do not sample have none."""
    logits = torch.full((5, 3, VOCAB), 0.0, device=DEVICE)
    logits[:, :, 2] = 1.0
    logits[0, 1], logits[1, 0], logits[2, 2, 3] = -torch.inf, torch.nan, torch.inf
    rows, drafts = torch.arange(5, dtype=torch.int32, device=DEVICE), torch.full((5, 2), 2, dtype=torch.int32, device=DEVICE)
    seed = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    given = (*lines_of(rows, rows + 1, drafts, rows != 4), None, None, None, None, seed, rows)
    tokens, counts, ok = verify(logits.flatten(0, 1), *given)
    assert (counts.tolist(), ok.tolist()) == ([1, 0, 2, 3, 0], [True, False, True, True, True])
    assert tokens[3].tolist() == [2, 2, 2]


@each_verifier
def test_typical_acceptance(verify: Verify) -> None:
    """Keeps every draft that is likely enough and those that are drawn, and no others; greedy rows as ever."""
    threshold, factor = 0.3, 0.5
    world = World(MODEL, 20_000)
    drafts = (world.rows % VOCAB).unsqueeze(1).expand(-1, K).contiguous()
    plain = World(MODEL, 20_000)
    plain.verify(verify, drafts)
    counts = world.verify(verify, drafts, typical=(threshold, factor))
    chance = MODEL[0].softmax(-1)
    entropy = -(chance * chance.clamp(min=1e-30).log()).sum()
    enough = (chance > min(threshold, factor * (-entropy).exp().item())).tolist()
    assert 0 < sum(enough) < VOCAB
    own = plain.tokens[:, 1]
    for token in range(VOCAB):
        mine = drafts[:, 0] == token
        accepted = world.tokens[mine, 1] == token
        assert torch.equal(accepted, torch.full_like(accepted, True) if enough[token] else own[mine] == token)
        assert (counts[mine & (world.tokens[:, 1] != token)] == 1).all()
    cold = World(MODEL, 64, temperature=0.0)
    assert set(cold.verify(verify, torch.full_like(drafts[:64], 3), typical=(1e-9, 1e-9)).tolist()) == {1}
