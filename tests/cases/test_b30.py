"""B30: a preempted request that found its own pages in the cache was planned for more tokens than remained, or lost one on resume."""

from __future__ import annotations

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

TOTALS = [15, 16, 17, 31, 32, 33]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("meanwhile", ["nothing", "overwritten", "sharer"])
@pytest.mark.parametrize("depth", [1, 2])
def test_resume_finds_its_own_pages(total: int, meanwhile: str, depth: int) -> None:
    """Meanwhile: nothing runs before the resume; another request overwrites the pages; one with the same prefix runs beside it."""
    subject = dense()
    rows = 2 if meanwhile == "sharer" else 1
    driver = Driver(subject.engine(depth=depth, pages=10, rows=rows, policy="priority", device="deferred_cpu"))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    prompt = P(12, 1)
    others: dict[str, tuple[list[int], SamplingParams]] = {}
    driver.add("a", prompt, greedy(40))
    if meanwhile == "sharer":
        others["sharer"] = (prompt + P(9, 4)[1:], greedy(40))
        driver.add("sharer", *others["sharer"])
    driver.step_until(lambda: len(prompt) + driver.num_tokens("a") >= total)
    probe.preempt("a")
    known = probe.known("a")
    assert known >= total
    if meanwhile == "overwritten":
        others["filler"] = (P(100, 7), greedy(50))
        driver.add("filler", *others["filler"], priority=-1)
        driver.step_until(lambda: driver.is_finished("filler"))
    before = probe.counters()
    driver.step_until(lambda: driver.num_tokens("a") > known - len(prompt))
    if meanwhile != "sharer":
        hit = probe.counters().cached_tokens - before.cached_tokens
        assert hit == {"nothing": (known - 1) // 16 * 16, "overwritten": 0}[meanwhile]
        computed = probe.counters().computed_tokens - before.computed_tokens
        sampled = driver.num_tokens("a") - (known - len(prompt))
        assert computed == known - hit + sampled - 1
    driver.finish()
    assert driver.final("a").metrics.num_preemptions >= 1
    assert_same(subject, prompt, greedy(40), driver.result("a"))
    for name, (other, params) in others.items():
        assert_same(subject, other, params, driver.result(name))
    probe.assert_clean()
