"""B07: a step that scheduled no token returned nothing, and the code that read its result failed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from engine_world import last, run, start, until
from grammar_world import ChoicePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

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


def test_only_a_request_that_waits_for_its_grammar(tmp_path: Path) -> None:
    """(a) in a process of its own: the compile is held for a second, and the loop neither spins nor fails."""
    llm, gate = start(plugins=(ChoicePlugin(),), depth=2), tmp_path / "gate"
    params = PARAMS.model_copy(update={"structured_outputs": StructuredOutputsParams(choice=[f"hold:{gate}", "yes"])})

    async def go() -> None:
        task = asyncio.create_task(last(llm, P(9, 1), params))
        await until(lambda: llm.stats().waiting == 1)
        begun, turns = time.monotonic(), llm.stats().turns
        await asyncio.sleep(1)
        assert llm.stats().waiting == 1
        assert llm.stats().turns - turns < 200 * (time.monotonic() - begun)
        assert llm.health()
        gate.touch()
        output = (await task).outputs[0]
        assert (written(output.token_ids), output.finish_reason) == ("yes", "stop")

    try:
        run(go())
    finally:
        llm.close()


def test_a_request_waits_for_its_grammar_in_the_callers_process(tmp_path: Path) -> None:
    subject, gate = dense(), tmp_path / "gate"
    driver = Driver(Subject(subject.model, subject.key, (*subject.plugins, ChoicePlugin())).engine(depth=2))
    choice = StructuredOutputsParams(choice=[f"hold:{gate}", "yes"])
    driver.add("a", P(9, 1), PARAMS.model_copy(update={"structured_outputs": choice}))
    begun = time.monotonic()
    while time.monotonic() < begun + 0.5:
        assert driver.step() == []
    assert driver.steps < 200 * 0.5
    gate.touch()
    driver.finish()
    assert written(driver.result("a").token_ids) == "yes"
    EngineProbe(driver).assert_clean()
