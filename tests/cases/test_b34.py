"""B34: a request near the pool's limit was admitted, filled almost to the end, requeued and filled again for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(("model", "pages"), [(dense, 10), (hybrid, 13)])  # of the latter, a state takes up to four in a step of 32
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("requests", [2, 6])
@pytest.mark.parametrize("prefix", [False, True])
def test_requests_that_cannot_all_fit_still_finish(
    requests: int, depth: int, prefix: bool, model: Callable[[], Subject], pages: int
) -> None:
    subject = model()
    driver = Driver(subject.engine(depth=depth, pages=pages, tokens=32, prefix=prefix, device="deferred_cpu", device_seed=depth))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for s in range(1, requests + 1):
        driver.add(f"r{s}", P(60, s), PARAMS)
    silent = 0
    while driver.engine.has_unfinished():
        silent = 0 if driver.step() else silent + 1
        assert silent < 50, "50 steps without a token"
    for s in range(1, requests + 1):
        assert_same(subject, P(60, s), PARAMS, driver.result(f"r{s}"))
    counters = probe.counters()
    assert counters.preemptions >= 1
    if requests == 2:
        assert counters.computed_tokens < 4 * 200
    probe.assert_clean()
