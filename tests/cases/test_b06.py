"""B06: preempted requests kept their row, so new work hit an assertion once all rows were held by requests that did not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

LOW = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
HIGH = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize(("model", "pages"), [(dense, 16), (hybrid, 32)])  # each request holds two more of the latter's, for its state
@pytest.mark.parametrize("times", [1, 2])
def test_a_preempted_request_gives_up_its_row(times: int, model: Callable[[], Subject], pages: int) -> None:
    subject = model()
    driver = Driver(subject.engine(rows=4, pages=pages, policy="priority", device="deferred_cpu"))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    low = [f"low{s}" for s in range(4)]
    for s, name in enumerate(low):
        driver.add(name, P(30, s), LOW, priority=1)
    high: dict[str, list[int]] = {}
    for turn in range(times):
        driver.step_until(lambda turn=turn: all(driver.num_tokens(name) >= 5 * (turn + 1) for name in low))
        for name in low:
            probe.preempt(name)
        assert probe.num_running == 0
        held = {name: driver.num_tokens(name) for name in low}
        fresh = {f"high{turn}{s}": P(20, 10 + s + 4 * turn) for s in range(4)}
        for name, prompt in fresh.items():
            driver.add(name, prompt, HIGH, priority=0)
        driver.step_until(lambda fresh=fresh: all(driver.num_tokens(name) >= 1 for name in fresh))
        assert {name: driver.num_tokens(name) for name in low} == held, "the new ones waited for the preempted ones"
        assert probe.num_running <= 4
        high |= fresh
    driver.finish()
    assert probe.counters().preemptions >= 4 * times
    for s, name in enumerate(low):
        assert_same(subject, P(30, s), LOW, driver.result(name))
    for name, prompt in high.items():
        assert_same(subject, prompt, HIGH, driver.result(name))
    probe.assert_clean()
