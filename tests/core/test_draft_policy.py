"""How many drafts a step has: by load, and by what is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from modelrunner import SamplingParams
from modelrunner.draft_policy import NO_DRAFTS, PERIOD, PROBE, DraftPolicy
from modelrunner.request import Request
from modelrunner.testing import Driver, P, ScriptDrafterPlugin, assert_same, dense, ref

LATER = PROBE  # a step that is no probe


def taught(rates: list[float], spare: int = 256, draws: int = 4000, **options: int) -> DraftPolicy:
    """A policy that has seen drafts, of which so many are kept at each place if those before were."""
    policy = DraftPolicy(len(rates), spare_tokens=spare, **options)
    heads = np.random.default_rng(1).random((draws, len(rates))) < rates
    policy.learn(np.full(draws, len(rates), np.int32), np.cumprod(heads, 1).sum(1).astype(np.int32))
    return policy


def test_without_a_drafter_nothing_is_drafted() -> None:
    assert NO_DRAFTS.drafts_in(3, 100, LATER) == 0


def test_a_fixed_number_gives_way_to_the_bound_and_the_budget() -> None:
    policy = DraftPolicy(3, off_above_rows=10)
    assert [policy.drafts_in(rows, 1000, LATER) for rows in (1, 10, 11)] == [3, 3, 0]
    assert [policy.drafts_in(4, tokens, LATER) for tokens in (16, 15)] == [3, 0]
    assert DraftPolicy(3).choices == (3,)
    assert policy.choices == (3, 0)


def test_what_may_come_is_known_at_start() -> None:
    """Graphs are captured for no other steps."""
    fixed, bounded, adaptive = DraftPolicy(3), DraftPolicy(3, off_above_rows=10), DraftPolicy(4, spare_tokens=64)
    assert [fixed.possible(least, most, 64) for least, most in ((1, 8), (9, 16), (9, 24), (17, 24))] == [(3,), (3,), (3, 0), (0,)]
    assert [bounded.possible(least, most, 64) for least, most in ((1, 8), (9, 16), (11, 16))] == [(3, 0), (3, 0), (0,)]
    assert [adaptive.possible(least, most, 64) for least, most in ((1, 8), (17, 24), (30, 40))] == [(4, 2, 1, 0), (2, 1, 0), (1, 0)]
    for policy in (fixed, bounded, adaptive):
        for rows in range(1, 70):
            assert {policy.drafts_in(rows, 64, step) for step in range(PERIOD)} <= set(policy.possible(rows, rows, 64))


@pytest.mark.parametrize(("rates", "few", "many"), [([0.9] * 5, 5, 5), ([0.6] * 5, 5, 1), ([0.02] * 5, 0, 0), ([0.7, 0.05, 0, 0, 0], 1, 1)])
def test_more_is_drafted_where_more_is_kept_and_tokens_are_to_spare(rates: list[float], few: int, many: int) -> None:
    policy = taught(rates, spare=256)
    assert policy.drafts_in(8, 10_000, LATER) == few
    assert policy.drafts_in(100, 10_000, LATER) <= max(many, 3)
    assert policy.drafts_in(1000, 10_000, LATER) <= policy.drafts_in(8, 10_000, LATER)
    assert policy.expected(5) == pytest.approx(1 + np.cumprod(rates).sum(), rel=0.1)


def test_a_probe_drafts_as_much_as_may_be() -> None:
    policy = taught([0.01] * 4)
    chosen = [policy.drafts_in(8, 10_000, step) for step in range(PERIOD)]
    assert chosen == [4] * PROBE + [0] * (PERIOD - PROBE)


def test_it_forgets() -> None:
    policy = taught([0.95] * 4)
    assert policy.drafts_in(8, 1000, LATER) == 4
    for _ in range(200):
        policy.learn(np.full(8, 4, np.int32), np.zeros(8, np.int32))
    assert policy.drafts_in(8, 1000, LATER) == 0


@pytest.mark.parametrize("captures", [False, True])
def test_tokens_do_not_depend_on_it(captures: bool) -> None:
    """Drafts that are right at first and wrong later: k falls, and tokens stay."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    def script(request: Request) -> list[int]:
        output = ref(dense(), request.prompt_token_ids, params).token_ids
        return [token if place < 40 else (token + 1) % 331 for place, token in enumerate(output)]

    subject = replace(dense(), plugins=(*dense().plugins, ScriptDrafterPlugin(script)))
    driver = Driver(subject.engine(drafter="script", drafts=4, spare_tokens=64, device="deferred_cpu", captures=captures))
    prompts = [P(9 + number, number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, params)
    driver.finish()
    for number, prompt in enumerate(prompts):
        assert_same(dense(), prompt, params, driver.result(str(number)))
    stats = driver.engine.scheduler.stats
    assert stats.accepted_at[0] >= 4 * 7
    assert stats.num_drafted < 4 * (40 + 4 * 40), "drafting goes on as if they were right"
