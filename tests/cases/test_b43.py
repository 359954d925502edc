"""B43: state memory was handed out without clearing, so a new request began with whatever a former one had left."""

from __future__ import annotations

import pytest
import torch
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def pages(driver: Driver, *groups: str) -> set[int]:
    """Pages of running requests in these groups."""
    tables = [table for table in driver.engine.scheduler.rows.tables if table.layout.name in groups]
    return {page for table in tables for page in table.pages.flatten().tolist()} - {0}


@pytest.mark.parametrize("end", ["finished", "aborted", "preempted"])
@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_a_reused_state_starts_from_zero(chunk: int, end: str, device: str) -> None:
    """One row; memory is full of NaN at the start and wherever it is freed, so a state that is not new spoils every logit."""
    subject = hybrid()
    driver = Driver(subject.engine(rows=1, pages=7, tokens=chunk, prefix=False, policy="priority", device=device))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for cache in driver.engine.runner.parts.caches.values():
        cache[1:] = torch.nan
    driver.engine.assembly.device.synchronize()
    for n in (1, 3, 16, 17):
        driver.add(f"a{n}", P(30, 1), PARAMS, priority=1)
        driver.step_until(lambda n=n: driver.num_tokens(f"a{n}") >= 5)
        used = pages(driver, "full", "recurrent")
        if end == "finished":
            driver.finish()
        elif end == "aborted":
            driver.engine.abort(f"a{n}")
        else:
            probe.preempt(f"a{n}")
        driver.add(f"b{n}", P(n, 2), PARAMS, priority=0)
        driver.step_until(lambda n=n: probe.row_of(f"b{n}") >= 0)
        assert pages(driver, "recurrent") & used, "the new request was not given what the old one had"
        driver.finish()
        assert_same(subject, P(n, 2), PARAMS, driver.result(f"b{n}"))
        if end != "aborted":
            assert_same(subject, P(30, 1), PARAMS, driver.result(f"a{n}"))
    assert probe.counters().preemptions == (4 if end == "preempted" else 0)
    probe.assert_clean()
