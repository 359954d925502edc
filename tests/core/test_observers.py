"""Observers: what they are told, when, and that it costs a step nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from modelrunner import Observer, OutputKind, RequestFinish, RequestStart, SamplingParams, StepReport, hookimpl
from modelrunner.engine import Engine
from modelrunner.errors import PluginWarning
from modelrunner.testing import Driver, P, assert_same, dense, mixed, scripted
from modelrunner.testing.subjects import options

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


class Watches:
    """A plugin of the given observers."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, *observers: Any) -> None:
        self.observers = list(observers)

    @hookimpl
    def observer(self) -> Sequence[Observer]:
        return self.observers


class Log(Observer):
    """Writes everything down."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step(self, report: StepReport) -> None:
        self.events.append(report)

    def on_request_start(self, event: RequestStart) -> None:
        self.events.append(event)

    def on_request_finish(self, event: RequestFinish) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.events.append("closed")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def driver(*observers: Any, **short: Any) -> Driver:
    subject = dense()
    return Driver(Engine({"model": {"name": subject.model}} | options(**short), plugins=[*subject.plugins, Watches(*observers)]))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_step_and_request_is_told(depth: int) -> None:
    log = Log()
    run = driver(log, depth=depth, device="deferred_cpu", tokens=16)
    run.add("a", P(20, 1), GREEDY, priority=3)
    run.add("b", P(9, 2), GREEDY)
    run.step()
    run.add("c", P(9, 3), GREEDY)
    run.engine.abort("c")
    run.finish()
    run.engine.close()
    run.engine.close()
    steps: list[StepReport] = log.of(StepReport)
    assert [report.step for report in steps] == list(range(run.engine.scheduler.stats.steps))
    for report in steps:
        assert report.planning <= report.planned <= report.launched <= report.waiting <= report.arrived <= report.committed
    assert sum(report.num_generated for report in steps) == 12
    assert sum(report.num_finished for report in steps) == 2
    assert sum(report.num_tokens for report in steps) >= 20 + 9 + 10
    assert (steps[0].num_rows, steps[0].num_tokens, steps[0].num_decode) == (1, 16, 0)
    assert (steps[0].num_running, steps[0].num_waiting, steps[0].num_in_flight) == (1, 1, 1)
    assert (steps[0].pages_free, steps[0].pages_total, steps[0].num_preemptions) == (127, 128, 0)
    assert max(report.num_in_flight for report in steps) == depth
    starts: list[RequestStart] = log.of(RequestStart)
    assert [(s.request_id, s.num_prompt_tokens, s.priority) for s in starts] == [("a", 20, 3), ("b", 9, 0), ("c", 9, 0)]
    ends = {event.request_id: event for event in log.of(RequestFinish)}
    assert {name: (e.reason, e.num_output_tokens) for name, e in ends.items()} == {
        "a": ("length", 6),
        "b": ("length", 6),
        "c": ("abort", 0),
    }
    assert ends["c"].first_token is None
    assert ends["a"].first_token is not None
    assert ends["a"].arrival < ends["a"].first_token < ends["a"].finished
    assert log.events[-1] == "closed"
    assert log.events.count("closed") == 1


def test_the_end_of_a_request_comes_after_the_report_of_its_last_step() -> None:
    log = Log()
    run = driver(log, depth=1)
    run.add("a", P(9, 1), GREEDY)
    run.finish()
    assert isinstance(log.events[0], RequestStart)
    assert isinstance(log.events[-1], RequestFinish)
    assert len(log.of(StepReport)) == 6


@pytest.mark.filterwarnings("ignore:.*max_model_len.*")
def test_preemptions_are_told_with_the_step_that_they_made_room_for() -> None:
    log = Log()
    run = driver(log, depth=2, pages=12, page_size=4)
    for i in range(4):
        run.add(str(i), P(9, i), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    run.finish()
    told = sum(report.num_preemptions for report in log.of(StepReport))
    assert told == run.engine.scheduler.stats.preemptions > 0
    assert sum(event.num_preemptions for event in log.of(RequestFinish)) == told


def test_reports_are_told_after_the_next_launch() -> None:
    order: list[str] = []

    class Notes(Observer):
        def on_step(self, report: StepReport) -> None:
            order.append(f"told {report.step}")

    run = driver(Notes(), depth=2)
    launch = run.engine.runner.launch
    run.engine.runner.launch = lambda plan: (order.append(f"launch {plan.step}"), launch(plan))[1]  # type: ignore[method-assign]
    run.add("a", P(9, 1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    run.finish()
    assert order == ["launch 0", "launch 1", "launch 2", "told 0", "launch 3", "told 1", "told 2", "told 3"]


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_an_observer_that_raises_harms_nobody(kind: type[BaseException]) -> None:
    class Broken(Log):
        def on_step(self, report: StepReport) -> None:
            raise kind("no")

    broken, log = Broken(), Log()
    run = driver(broken, log, depth=2)
    run.add("a", P(20, 1), GREEDY)
    with pytest.warns(PluginWarning, match=rf"observer Broken of plugin .*Watches.* raised in on_step: {kind.__name__}: no"):
        run.finish()
    assert_same(dense(), P(20, 1), GREEDY, run.result("a"))
    assert len(log.of(StepReport)) == 6
    run.engine.close()
    assert broken.of(RequestFinish) == []
    assert "closed" not in broken.events


def test_an_answer_that_is_no_observer_is_reported() -> None:
    with pytest.warns(PluginWarning, match="an instance of modelrunner.observers.Observer, a list of these, or None is needed"):
        run = driver(print)
    run.add("a", P(9, 1), GREEDY)
    run.finish()


# Cost


class Idle(Observer):
    """Overrides nothing."""


class Deaf(Observer):
    """Overrides everything, to do nothing."""

    def on_step(self, report: StepReport) -> None: ...

    def on_request_start(self, event: RequestStart) -> None: ...

    def on_request_finish(self, event: RequestFinish) -> None: ...


def steady(*observers: Observer) -> Engine:
    """An engine of 16 decoding rows, past its prompts."""
    subject = scripted(mixed(), "observed")
    run = Driver(Engine({"model": {"name": subject.model}} | options(rows=16, pages=512), plugins=[*subject.plugins, Watches(*observers)]))
    for k in range(16):
        run.add(str(k), P(2 + k, k), LONG)
    for _ in range(20):
        run.step()
    return run.engine


def calls(engine: Engine, names: Sequence[str], steps: int = 32) -> dict[str, float]:
    """Calls that the interpreter makes a step inside each of the named parts of the loop."""
    counted: dict[str, int] = dict.fromkeys(names, 0)
    inside: list[str] = []

    def count(frame: FrameType, kind: str, argument: Any) -> None:
        if inside and kind in ("call", "c_call"):
            counted[inside[-1]] += 1

    def entering(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **options: Any) -> Any:
            inside.append(name)
            try:
                return original(*arguments, **options)
            finally:
                inside.pop()

        return inner

    for name in names:
        part, method = name.split(".")
        setattr(getattr(engine, part), method, entering(name, getattr(getattr(engine, part), method)))
    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
    return {name: n / steps for name, n in counted.items()}


LOOP = ("scheduler.plan", "runner.launch", "runner.collect", "scheduler.commit")


@pytest.mark.parametrize("kind", [Idle, Deaf])
def test_ten_observers_add_no_call_inside_the_loop(kind: type[Observer]) -> None:
    without, ten = calls(steady(), LOOP), calls(steady(*(kind() for _ in range(10))), LOOP)
    assert min(without.values()) > 1, "the counter must see the calls that are there"
    assert ten == without


def test_idle_observers_are_told_nothing() -> None:
    """Nothing is built for methods that nobody overrides: the same calls in all of the step."""
    every = ("watch.launched", "watch.committed", "watch.deliver")
    assert calls(steady(*(Idle() for _ in range(10))), every) == calls(steady(), every)
    assert calls(steady(*(Deaf() for _ in range(10))), every) != calls(steady(), every)


@pytest.mark.parametrize(("kind", "limit"), [(Idle, 20e-6), (Deaf, 200e-6)])
def test_ten_observers_cost_little_a_step(kind: type[Observer], limit: float) -> None:
    """Idle ones override nothing; deaf ones are called, ten times a step."""
    engine = steady(*(kind() for _ in range(10)))
    watch = engine.watch
    spent = 0.0
    best = float("inf")
    originals = {name: getattr(watch, name) for name in ("launched", "committed", "deliver")}

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any) -> None:
            nonlocal spent
            begin = time.perf_counter()
            original(*arguments)
            spent += time.perf_counter() - begin

        return inner

    for name, original in originals.items():
        setattr(watch, name, timed(original))
    for _ in range(100):  # the machine has slow spells: the best step counts
        spent = 0.0
        engine.step()
        best = min(best, spent)
    assert 0 < best < limit, f"{best * 1e6:.1f} microseconds"
