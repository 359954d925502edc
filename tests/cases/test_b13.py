"""B13: with a drafter, penalties, min_p and similar settings were silently ignored, or the last committed token was counted twice."""

from __future__ import annotations

from typing import Any

import pytest
from draft_world import PATTERNS, drafted, greedy

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, R, assert_same, dense, ref

PROMPTS = {"script": P(20, 3), "ngram": R(6)}
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "logit_bias": {"logit_bias": {50: 5.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 60))},
    "min_tokens": {"min_tokens": 10},
    "top_k": {"temperature": 1.0, "seed": 5, "top_k": 4},
    "top_p": {"temperature": 1.0, "seed": 5, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.3},
    "all filters and penalties": {"temperature": 0.9, "seed": 6, "min_p": 0.02, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}


def with_setting(name: str, prompt: list[int]) -> SamplingParams:
    """The request of one setting; those about the output's own tokens are made from the plain one."""
    output = list(ref(dense(), prompt, greedy()).token_ids)
    made: dict[str, dict[str, Any]] = {
        "bad_words": {"bad_words": [tuple(output[4:6])]},
        "stop_token_ids": {"stop_token_ids": (output[9],)},
        "min_tokens": {"stop_token_ids": (output[2], output[11]), "min_tokens": 10},
    }
    return greedy(**(made.get(name) or SETTINGS[name]))


NAMES = [*SETTINGS, "bad_words", "stop_token_ids"]


def check(driver: Driver, prompt: list[int]) -> None:
    for name in NAMES:
        driver.add(name, prompt, with_setting(name, prompt))
    driver.finish()
    for name in NAMES:
        assert_same(dense(), prompt, with_setting(name, prompt), driver.result(name))
    assert driver.engine.scheduler.stats.num_drafted > 0
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_setting_acts_as_without_a_drafter(pattern: str, device: str) -> None:
    """Greedy tokens and seeded drawn ones are the reference's, whatever is accepted; all in one batch."""
    subject = drafted(PATTERNS[pattern])
    driver = Driver(subject.engine(drafter="script", drafts=3, rows=16, device=device))
    check(driver, PROMPTS["script"])
    stats = driver.engine.scheduler.stats
    if pattern == "wrong":
        assert stats.num_accepted == 0
    elif pattern == "right":
        assert stats.num_accepted >= stats.num_drafted - 3  # a draft behind a stop id does not count
    else:
        assert 0 < stats.num_accepted < stats.num_drafted


def test_every_setting_acts_beside_ngram_drafts(device: str) -> None:
    driver = Driver(dense().engine(drafter="ngram", drafts=3, rows=16, device=device))
    check(driver, PROMPTS["ngram"])


@pytest.mark.parametrize("pattern", ["right", "first right"])
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_alone(name: str, pattern: str) -> None:
    """So that no other row's features switch anything on."""
    driver = Driver(drafted(PATTERNS[pattern]).engine(drafter="script", drafts=3, device="deferred_cpu", captures=True))
    params, prompt = with_setting(name, PROMPTS["script"]), PROMPTS["script"]
    driver.add("a", prompt, params)
    driver.finish()
    assert_same(dense(), prompt, params, driver.result("a"))
    assert driver.engine.scheduler.stats.num_drafted > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_every_setting_acts_after_a_preemption(depth: int) -> None:
    """Drafts that lay behind a row's tokens, and counts that had seen some of its tokens, are gone with the row."""
    driver = Driver(drafted(PATTERNS["first right"]).engine(drafter="script", drafts=3, rows=16, depth=depth, device="deferred_cpu"))
    probe, prompt = EngineProbe(driver), PROMPTS["script"]
    probe.poison_freed_pages()
    for name in NAMES:
        driver.add(name, prompt, with_setting(name, prompt))
    for _ in range(3):
        for _ in range(3):
            driver.step()
        probe.drain()
        for name in [name for name in driver.engine.requests if probe.row_of(name) >= 0]:
            probe.preempt(name)
    driver.finish()
    for name in NAMES:
        assert_same(dense(), prompt, with_setting(name, prompt), driver.result(name))
    stats = driver.engine.scheduler.stats
    assert stats.preemptions > len(NAMES)
    assert stats.num_accepted > 0
    probe.assert_clean()
