"""Guides: compiling beside the loop, limits, failures of backends, held rows, and requests without a backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import last, run, start
from grammar_world import ChoicePlugin, written

from modelrunner import Decline, SamplingParams, StructuredOutputsParams, hookimpl
from modelrunner.compiling import Compiler
from modelrunner.errors import RequestError
from modelrunner.grammar import Grammar, GrammarBackend, Matcher, Vocabulary
from modelrunner.observers import Observer, StepReport
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense
from modelrunner.testing.byte_tokenizer import ByteTokenizer

PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TEXTS = ["one thing", "another thing", "xyz"]


def choice(*texts: str, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1, seed=4, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=texts or TEXTS), **more)


def subject(*plugins: object) -> Subject:
    return Subject(dense().model, "guided", (*dense().plugins, ChoicePlugin(), *plugins))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def made(*plugins: object, settings: dict[str, Any] | None = None, **short: Any) -> Driver:
        for name, value in (settings or {}).items():
            monkeypatch.setenv(f"MODELRUNNER_{name.upper().replace('.', '__')}", str(value))
        return Driver(subject(*plugins).engine(**short))

    return made


# ---- in an engine --------------------------------------------------------------------------------------------------------


def test_without_a_backend_only_these_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_DISABLE_PLUGINS", "modelrunner:grammars")

    class Refuses:
        MODELRUNNER_API = ">=1,<2"

        @hookimpl
        def grammar_backend(self) -> Decline:
            return Decline("acme is not installed")

    driver = Driver(Subject(dense().model, "none", (*dense().plugins, Refuses())).engine())
    with pytest.raises(RequestError, match=r"(?s)structured_outputs: no grammar backend is there.*acme is not installed"):
        driver.add("a", P(9, 1), choice())
    assert not driver.engine.has_unfinished()
    EngineProbe(driver).assert_alive(dense())


def test_a_tokenizer_that_tells_no_bytes_fails_only_these_requests(make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make()
    assert isinstance(driver.engine.tokenizer, ByteTokenizer)
    monkeypatch.delattr(ByteTokenizer, "token_bytes")
    driver.add("a", P(9, 1), choice())
    driver.add("n", P(20, 3), PLAIN)
    driver.finish()
    assert driver.result("a").finish_reason == "error"
    assert "ByteTokenizer does not say which bytes" in str(driver.result("a").stop_reason)
    assert_same(dense(), P(20, 3), PLAIN, driver.result("n"))


def test_too_large_a_grammar_is_refused(make: Callable[..., Driver]) -> None:
    driver = make(settings={"grammar.max_bytes": 10})
    with pytest.raises(RequestError, match=r"structured_outputs.choice: got 25 bytes; accepted: at most 10 \(setting grammar.max_bytes\)"):
        driver.add("a", P(9, 1), choice())
    driver.add("b", P(9, 1), choice("abcde"))
    driver.finish()
    assert written(driver.result("b").token_ids) == "abcde"


def test_no_seats_for_masks(make: Callable[..., Driver]) -> None:
    driver = make(settings={"sampler.allow_list_seats": 0})
    with pytest.raises(RequestError, match="allowed_ids"):
        driver.add("a", P(9, 1), choice())
    assert not driver.engine.has_unfinished()


@pytest.mark.parametrize("depth", [1, 2])
def test_max_tokens_cuts_an_output_that_is_not_complete(make: Callable[..., Driver], depth: int) -> None:
    """It is the beginning of one that satisfies the constraint, and the reason says that it is cut; one that is complete in time is not."""
    texts = ["a long text that goes on", "another long text that goes on"]
    driver = make(depth=depth)
    params = choice(*texts).model_copy(update={"max_tokens": 3})
    driver.add("cut", P(9, 1), params)
    driver.add("whole", P(9, 2), choice(*texts).model_copy(update={"max_tokens": max(map(len, texts))}))
    driver.finish()
    cut, whole = driver.result("cut"), driver.result("whole")
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert any(text.startswith(written(cut.token_ids)) for text in texts)
    assert (whole.finish_reason, written(whole.token_ids) in texts) == ("stop", True)
    EngineProbe(driver).assert_clean()


def test_requests_share_few_seats(make: Callable[..., Driver]) -> None:
    driver = make(settings={"sampler.allow_list_seats": 2})
    for i in range(6):
        driver.add(f"r{i}", P(9, i), choice())
    most = 0
    while driver.engine.has_unfinished():
        driver.step()
        most = max(most, driver.engine.scheduler.num_guided)
    assert most == 2
    assert all(written(driver.result(f"r{i}").token_ids) in TEXTS for i in range(6))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("texts", "says"),
    [(["boom"], "structured_outputs.choice: KeyError: 'planted'"), (["ab!cdefgh"], "the grammar backend failed: RuntimeError: planted")],
)
def test_a_backend_that_fails_ends_one_request(make: Callable[..., Driver], depth: int, texts: list[str], says: str) -> None:
    driver = make(depth=depth)
    driver.add("n", P(20, 3), PLAIN)
    driver.add("a", P(9, 1), choice(*texts))
    driver.add("b", P(9, 2), choice())
    driver.finish()
    assert driver.result("a").finish_reason == "error"
    assert says in str(driver.result("a").stop_reason)
    assert written(driver.result("b").token_ids) in TEXTS
    assert_same(dense(), P(20, 3), PLAIN, driver.result("n"))
    EngineProbe(driver).assert_clean()


def test_a_compile_beyond_its_limit_ends_the_request(make: Callable[..., Driver], tmp_path: Path) -> None:
    driver = make(settings={"grammar.compile_limit": 0.05, "grammar.compile_threads": 1})
    gate = tmp_path / "gate"
    driver.add("n", P(20, 3), PLAIN)
    driver.add("a", P(9, 1), choice(f"hold:{gate}", "yes"))
    driver.finish()
    assert driver.result("a").finish_reason == "error"
    assert driver.result("a").stop_reason == (
        "structured_outputs.choice: it was not compiled within 0.05 seconds (setting grammar.compile_limit)"
    )
    driver.add("b", P(9, 2), choice())  # the only thread is lost; another one takes its place
    driver.finish()
    assert written(driver.result("b").token_ids) in TEXTS
    gate.touch()
    assert_same(dense(), P(20, 3), PLAIN, driver.result("n"))
    EngineProbe(driver).assert_clean()


def test_others_pass_a_request_that_waits_for_its_grammar(make: Callable[..., Driver], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    driver = make(rows=2)
    driver.add("a", P(9, 1), choice(f"hold:{gate}", "yes"))
    driver.add("b", P(9, 2), PLAIN)
    driver.step_until(lambda: driver.is_finished("b"))
    assert not driver.outputs["a"]
    gate.touch()
    driver.finish()
    assert written(driver.result("a").token_ids) == "yes"


def test_a_deadline_passes_while_a_grammar_is_compiled(make: Callable[..., Driver], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    driver = make()
    driver.add("a", P(9, 1), choice(f"hold:{gate}", "yes"), deadline=0.05)
    driver.finish()
    assert driver.result("a").finish_reason == "timeout"
    gate.touch()
    EngineProbe(driver).assert_clean()


class Watcher(Observer):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_held_rows_are_counted_and_the_others_run_in_every_step(make: Callable[..., Driver], depth: int) -> None:
    watcher = Watcher()

    class Plugin:
        MODELRUNNER_API = ">=1,<2"

        @hookimpl
        def observer(self) -> Observer:
            return watcher

    driver = make(Plugin(), depth=depth)
    driver.add("plain", P(9, 3), PLAIN)
    driver.add("a", P(9, 1), choice("abcdefghijkl"))
    driver.step_until(lambda: driver.is_finished("plain"))
    plain_steps = [report for report in watcher.reports if report.num_rows]
    driver.finish()
    held = [report for report in watcher.reports if report.num_held]
    assert driver.engine.scheduler.stats.held == sum(report.num_held for report in watcher.reports)
    assert bool(held) == (depth > 1)
    assert all(report.num_rows >= 1 for report in held), "a step ran with nobody in it"
    assert len(plain_steps) <= 20 + 1 + depth, "the plain request waited for the other's masks"
    EngineProbe(driver).assert_clean()


def test_with_only_constrained_rows_nobody_is_held(make: Callable[..., Driver]) -> None:
    driver = make(depth=2)
    for i in range(3):
        driver.add(f"r{i}", P(9, i), choice("abcdefghijkl"))
    driver.finish()
    steps = driver.engine.scheduler.stats.steps
    assert steps <= 3 * 12
    assert all(written(driver.result(f"r{i}").token_ids) == "abcdefghijkl" for i in range(3))


def test_a_late_mask_holds_its_row_and_nobody_else(make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the loop has time for one mask: the other rows wait for theirs, the plain one does not."""
    driver = make(depth=2, settings={"grammar.fill_seconds": 1e-9})
    driver.add("plain", P(9, 7), PLAIN)
    for i in range(4):
        driver.add(f"r{i}", P(9, i), choice("abcdefghij"))
    late = 0
    while not driver.is_finished("plain"):
        driver.step()
        late = max(late, len(driver.engine.guides._late))
    assert late >= 1
    assert sum(driver.num_tokens(f"r{i}") for i in range(4)) >= 10, "one mask a turn, however long it takes"
    driver.finish()
    assert all(written(driver.result(f"r{i}").token_ids) == "abcdefghij" for i in range(4))
    assert_same(dense(), P(9, 7), PLAIN, driver.result("plain"))
    EngineProbe(driver).assert_clean()


def test_a_step_that_cannot_be_launched_sends_its_masks_again(make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make(depth=2)
    for i in range(3):
        driver.add(f"r{i}", P(9, i), choice())
    driver.add("plain", P(9, 7), PLAIN)
    device, failures = driver.engine.assembly.device, 0
    launch = device.launch

    def failing(work: Any) -> None:
        raise RuntimeError("planted")

    for turn in range(200):
        if not driver.engine.has_unfinished():
            break
        if turn % 3 == 2:
            monkeypatch.setattr(device, "launch", failing)
            monkeypatch.setattr(driver.engine.runner, "_rewind", lambda: None)
            try:
                driver.step()
            except RuntimeError as error:
                failures += str(error) == "planted"
            monkeypatch.setattr(device, "launch", launch)
        else:
            driver.step()
    assert failures > 3
    assert all(written(driver.result(f"r{i}").token_ids) in TEXTS for i in range(3))
    assert_same(dense(), P(9, 7), PLAIN, driver.result("plain"))
    EngineProbe(driver).assert_clean()


def test_in_a_process_of_its_own() -> None:
    """The front end has the tokenizer, the engine process loads one when a grammar asks for it."""
    llm = start(plugins=(ChoicePlugin(),), depth=2)

    async def go() -> None:
        text = (await last(llm, "Say", choice())).outputs[0]
        assert (text.text in TEXTS, text.finish_reason) == (True, "stop")
        bad = (await last(llm, "Say", choice("boom"))).outputs[0]
        assert (bad.finish_reason, bad.stop_reason) == ("error", "structured_outputs.choice: KeyError: 'planted'")
        assert llm.stats().waiting == llm.stats().running == 0
        assert llm.stats().grammar_ways == {"host: the grammar backend makes no automata": 1}

    try:
        run(go())
    finally:
        llm.close()


# ---- the compiler --------------------------------------------------------------------------------------------------------


class Slow(GrammarBackend):
    """Compiles when told to."""

    def __init__(self) -> None:
        super().__init__(Vocabulary([b"a"], (0,)), None)  # type: ignore[arg-type]
        self.gates: dict[str, threading.Event] = {}
        self.begun: list[str] = []
        self.at_once = self.most = 0

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        name = str(params.regex)
        self.begun.append(name)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        assert self.gates.setdefault(name, threading.Event()).wait(30)
        self.at_once -= 1
        if name == "bad":
            raise ValueError("no")
        return Nothing()


class Nothing(Grammar):
    def matcher(self) -> Matcher:
        raise NotImplementedError


@pytest.fixture
def slow() -> Iterator[Slow]:
    backend = Slow()
    yield backend
    for gate in backend.gates.values():
        gate.set()


def regex(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=name)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def open_gate(backend: Slow, name: str) -> None:
    backend.gates.setdefault(name, threading.Event()).set()


def test_so_many_compile_at_once_and_equal_ones_once(slow: Slow) -> None:
    compiler = Compiler(lambda: slow, threads=2, kept=8)
    first = compiler.submit(regex("a"))
    until(lambda: slow.begun == ["a"])  # a thread that is busy does not keep the second one from starting
    jobs = [first, *(compiler.submit(regex(name)) for name in ("b", "c", "a"))]
    assert jobs[0] is jobs[3]
    until(lambda: len(slow.begun) == 2)
    time.sleep(0.02)
    assert sorted(slow.begun) == ["a", "b"]
    for name in "abc":
        open_gate(slow, name)
    until(lambda: all(job.done for job in jobs))
    assert slow.most == 2
    assert all(job.grammar is not None and job.vocabulary is slow.vocabulary for job in jobs)
    assert compiler.submit(regex("a")) is jobs[0]


def test_a_failed_one_is_tried_again_and_old_ones_are_forgotten(slow: Slow) -> None:
    compiler = Compiler(lambda: slow, threads=1, kept=2)
    for name in ("bad", "a", "b", "c"):
        open_gate(slow, name)
    first = compiler.submit(regex("bad"))
    until(lambda: first.done)
    assert first.error == "structured_outputs.regex: no"
    assert compiler.submit(regex("bad")) is not first
    kept = [compiler.submit(regex(name)) for name in "abc"]
    until(lambda: all(job.done for job in kept))
    compiler.submit(regex("d"))
    open_gate(slow, "d")
    assert len(compiler._jobs) <= 3
    assert compiler.submit(regex("a")) is not kept[0]


def test_a_job_that_was_given_up_takes_no_place(slow: Slow) -> None:
    compiler = Compiler(lambda: slow, threads=1, kept=8)
    stuck, queued, good = (compiler.submit(regex(name)) for name in ("stuck", "queued", "good"))
    until(lambda: slow.begun == ["stuck"])
    open_gate(slow, "good")
    compiler.give_up(queued)
    compiler.give_up(stuck)
    until(lambda: good.done)
    assert slow.begun == ["stuck", "good"]
    open_gate(slow, "stuck")
    until(lambda: stuck.done and compiler._lost == 0)
    assert compiler._active == 0


def test_a_backend_that_cannot_be_made_fails_every_job() -> None:
    def broken() -> GrammarBackend:
        raise RequestError("structured_outputs: no such tokenizer")

    compiler = Compiler(broken, threads=1, kept=8)
    job = compiler.submit(regex("a"))
    until(lambda: job.done)
    assert (job.grammar, job.error) == (None, "structured_outputs: no such tokenizer")
    assert compiler.age(job, time.monotonic() + 99) == 0.0
