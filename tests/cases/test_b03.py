"""B03: a request cancelled while queued, or between the planning and the updating of a step, killed the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from grammar_world import ChoicePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

A = P(40, 1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
B = P(20, 2), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
C = P(9, 3), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)  # waits, and takes over the row of the aborted one


def abort(driver: Driver, reached: list[str]) -> Callable[[], None]:
    def act() -> None:
        reached.append("aborted")
        driver.engine.abort("a")

    return act


def queued(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    act()


def planned(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    probe.once("planned", act, lambda plan: probe.names("a", plan))
    driver.step_until(lambda: not probe.pending)


def first_chunk(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    driver.step_until(lambda: 0 < probe.committed("a") < 40)
    assert driver.num_tokens("a") == 0
    act()


def last_chunk_in_flight(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    probe.once("launched", act, lambda plan: probe.names("a", plan) and probe.planned("a") >= 40)
    driver.step_until(lambda: not probe.pending)
    assert driver.num_tokens("a") == 0


def decoding(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    driver.step_until(lambda: driver.num_tokens("a") >= 3)
    act()


def collected(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    driver.step_until(lambda: driver.num_tokens("a") >= 1)
    probe.once("collected", act)
    driver.step_until(lambda: not probe.pending)


def preempted(driver: Driver, probe: EngineProbe, act: Callable[[], None]) -> None:
    driver.step_until(lambda: driver.num_tokens("a") >= 3)
    probe.preempt("a")
    assert probe.counters().preemptions == 1
    act()


@pytest.mark.parametrize("moment", [queued, planned, first_chunk, last_chunk_in_flight, decoding, collected, preempted])
@pytest.mark.parametrize("a_first", [True, False])
def test_abort_at_every_point_of_the_life_cycle(moment: Callable[..., None], a_first: bool) -> None:
    subject = dense()
    driver = Driver(subject.engine(rows=2, pages=8, tokens=16, depth=2, device="deferred_cpu", run_probability=0.0))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for name, (prompt, params) in {"a": A, "b": B}.items() if a_first else {"b": B, "a": A}.items():
        driver.add(name, prompt, params)
    driver.add("c", *C)
    reached: list[str] = []
    moment(driver, probe, abort(driver, reached))
    assert reached == ["aborted"]
    before = driver.num_tokens("a")
    driver.finish()
    terminal = [output for output in driver.outputs["a"] if output.finished]
    assert len(terminal) == 1
    assert terminal[0].outputs[0].finish_reason == "abort"
    assert driver.num_tokens("a") == before
    assert_same(subject, *B, driver.result("b"))
    assert_same(subject, *C, driver.result("c"))
    probe.assert_alive(subject)
    probe.assert_clean()


@pytest.mark.parametrize("a_first", [True, False])
def test_abort_while_waiting_for_a_grammar(a_first: bool, tmp_path: Path) -> None:
    plain, gate = dense(), tmp_path / "gate"
    subject = Subject(plain.model, plain.key, (*plain.plugins, ChoicePlugin()))
    driver = Driver(subject.engine(rows=2, pages=8, tokens=16, depth=2, device="deferred_cpu", run_probability=0.0))
    probe = EngineProbe(driver)
    held = A[1].model_copy(update={"structured_outputs": StructuredOutputsParams(choice=[f"hold:{gate}", "yes"])})
    requests = {"a": (A[0], held), "b": B}
    for name in requests if a_first else reversed(requests):
        driver.add(name, *requests[name])
    driver.step_until(lambda: driver.num_tokens("b") >= 2)
    assert driver.engine.guides.num_compiling == 1
    assert driver.engine.scheduler.num_waiting == 1
    assert probe.row_of("a") == -1
    driver.engine.abort("a")
    driver.add("c", *C)
    driver.finish()
    assert (driver.result("a").finish_reason, len(driver.outputs["a"]), driver.num_tokens("a")) == ("abort", 1, 0)
    assert driver.engine.guides.num_compiling == 0
    assert_same(plain, *B, driver.result("b"))
    assert_same(plain, *C, driver.result("c"))
    gate.touch()  # lets the thread end, and the grammar can be asked for again
    driver.outputs.pop("a")
    driver.add("a", A[0], held)
    driver.finish()
    assert written(driver.result("a").token_ids) == "yes"
    probe.assert_alive(plain)
    probe.assert_clean()
