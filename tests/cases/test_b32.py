"""B32: a greedy request gave another text once its prefix was cached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense, ref

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [P(n, s) for s, n in enumerate([20, 31, 32, 33, 48, 64, 65, 90, 111, 120])]


@pytest.mark.parametrize(("model", "pages"), [(dense, 56), (hybrid, 112)])  # the latter's pages are of two groups
def test_cold_and_warm_runs_agree(model: Callable[[], Subject], pages: int, device: str) -> None:
    subject = model()
    driver = Driver(subject.engine(depth=2, pages=pages, rows=8, device=device))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()

    def check(label: str, together: bool = False, newest_first: bool = False) -> list[int]:
        order = list(enumerate(PROMPTS))
        for i, prompt in order[::-1] if newest_first else order:
            driver.add(f"{label}{i}", prompt, PARAMS)
            if not together:
                driver.finish()
        driver.finish()
        for i, prompt in enumerate(PROMPTS):
            result, want = driver.result(f"{label}{i}"), ref(subject, prompt, PARAMS)
            assert_same(subject, prompt, PARAMS, result)
            logprobs = [found.logprobs or () for found in (result, want)]
            assert len(logprobs[0]) == 12
            for one, other in zip(*logprobs, strict=True):  # tokens are equal, or alike to within 1e-4
                assert [given.logprob for given in one.values()] == pytest.approx([given.logprob for given in other.values()], abs=2e-4)
        return [driver.final(f"{label}{i}").num_cached_tokens for i in range(len(PROMPTS))]

    full_pages = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert check("cold") == [0] * len(PROMPTS)
    assert check("warm") == full_pages
    assert check("batch", together=True) == full_pages
    for i in range(2):  # evicts what was used longest ago
        driver.add(f"evict{i}", P(240, 40 + i), PARAMS)
    driver.finish()
    after = check("evicted", newest_first=True)
    assert 0 < sum(after) < sum(full_pages), "eviction should have taken a part"
    probe.assert_clean()
