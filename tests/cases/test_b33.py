"""B33: a prompt within the context limit but larger than the pool was accepted and retried for ever, and all others waited behind it."""

from __future__ import annotations

import pytest

from modelrunner import Engine, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, options


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize(("prompt", "max_tokens", "needed"), [(P(200, 1), 4, 204), (P(100, 3), 150, 250)], ids=["prompt", "growing"])
def test_a_request_too_large_for_the_pool_is_refused(prompt: list[int], max_tokens: int, needed: int) -> None:
    subject = dense()
    driver = Driver(subject.engine(pages=12))
    with pytest.raises(RequestError) as refusal:
        driver.add("large", prompt, greedy(max_tokens))
    assert str(needed) in str(refusal.value), "the tokens needed"
    assert "193" in str(refusal.value), "the tokens available: 192 in the cache and one more sampled"
    driver.add("small", P(10, 2), greedy(8))
    driver.finish()
    assert_same(subject, P(10, 2), greedy(8), driver.result("small"))
    EngineProbe(driver).assert_clean()


def test_choices_that_fit_are_served() -> None:
    """Each needs four pages, of which they share three."""
    subject = dense()
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    driver = Driver(subject.engine(pages=12))
    driver.add("four", P(60, 5), params)
    driver.add("small", P(10, 4), greedy(8))
    driver.finish()
    assert [(len(choice.token_ids), choice.finish_reason) for choice in driver.final("four").outputs] == [(4, "length")] * 4
    assert_same(subject, P(10, 4), greedy(8), driver.result("small"))
    with pytest.raises(RequestError, match="needs cache for 204 tokens"):
        driver.add("large", P(200, 1), params)
    EngineProbe(driver).assert_clean()


def test_the_largest_request_that_fits_is_served() -> None:
    subject = dense()
    driver = Driver(subject.engine(pages=12, tokens=64))
    driver.add("full", P(180, 1), greedy(13))  # the last token needs no place in the cache
    driver.finish()
    assert_same(subject, P(180, 1), greedy(13), driver.result("full"))


def test_start_warns_when_the_context_exceeds_the_pool() -> None:
    subject = dense()
    with pytest.warns(UserWarning, match="max_model_len"):
        Engine({"model": {"name": subject.model}} | options(pages=12), plugins=subject.plugins)
