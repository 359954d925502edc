"""B07: a step that scheduled no token returned nothing, and the code that read its result failed."""

from __future__ import annotations

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_the_only_request_is_aborted_right_after_its_plan() -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=2, device="deferred_cpu", run_probability=0.0))
    probe = EngineProbe(driver)
    driver.add("a", P(9, 1), PARAMS)
    probe.once("planned", lambda: driver.engine.abort("a"), lambda plan: probe.names("a", plan))
    driver.step()
    assert not probe.pending
    driver.finish()
    assert driver.result("a").finish_reason == "abort"
    assert not driver.result("a").token_ids
    probe.assert_alive(subject)
    probe.assert_clean()


def test_nothing_to_do_then_one_request() -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=2))
    assert not driver.engine.has_unfinished()
    for _ in range(5):
        assert driver.step() == []
    driver.add("a", P(9, 1), PARAMS)
    driver.finish()
    assert_same(subject, P(9, 1), PARAMS, driver.result("a"))
    assert driver.step() == []
    EngineProbe(driver).assert_clean()
