"""B07: a step that scheduled no token returned nothing, and the code that read its result failed."""

from __future__ import annotations

import asyncio
import time

from engine_world import last, run, start, until

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


def test_an_idle_engine_process_does_not_spin() -> None:
    """(c) with the engine in a process of its own: no request for 2 seconds and more, in under 200 turns a second, then one."""
    subject = dense()
    llm = start(depth=2)

    async def go() -> None:
        await until(lambda: llm.stats().turns > 0)
        begun, turns = time.monotonic(), llm.stats().turns
        await asyncio.sleep(2)
        await until(lambda: llm.stats().turns > turns)
        assert llm.stats().turns - turns < 200 * (time.monotonic() - begun)
        assert llm.health()
        assert_same(subject, P(9, 1), PARAMS, (await last(llm, P(9, 1), PARAMS)).outputs[0])

    try:
        run(go())
    finally:
        llm.close()
