"""What must not change the tokens: depth, graphs, chunks, company, prefix cache, preemption, drafts. 280 schedules on the deferred device.

Every run is also compared with the reference, request by request, and the engine's books are checked after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from modelrunner import SamplingParams, token_budget
from modelrunner.request import Request
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, assert_tokens, dense, ref

MAX_OUTPUT = 20
LONGEST = 70  # tokens of a prompt
GREEDY = {"temperature": 0.0}
STYLES = (GREEDY, GREEDY, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, {"temperature": 1.0, "top_k": 12, "min_p": 0.02, "seed": -3})


@pytest.fixture(scope="module", autouse=True)
def small_crowds() -> Iterator[None]:
    """So that the few rows here hold prompts to `mixed_tokens`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_budget, "CROWD", 4)
        yield


@dataclass(frozen=True)
class Wish:
    """A request. style: index of STYLES. stop_at: the output token of that index becomes a stop id. arrival, abort: engine steps."""

    length: int
    salt: int
    style: int
    max_tokens: int
    stop_at: int | None
    arrival: int
    abort: int | None

    @property
    def prompt(self) -> list[int]:
        return P(self.length, self.salt)

    def full(self) -> list[int]:
        """The reference output at full length; shorter ones are its beginnings, so few references are computed."""
        params = SamplingParams(max_tokens=MAX_OUTPUT, ignore_eos=True, **STYLES[self.style])
        return list(ref(dense(), self.prompt, params).token_ids)

    def params(self) -> SamplingParams:
        stops = () if self.stop_at is None else (self.full()[self.stop_at],)
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, stop_token_ids=stops, **STYLES[self.style])

    def expected(self) -> tuple[list[int], str]:
        """Output ids and finish reason, from the reference alone."""
        output = self.full()
        if self.stop_at is not None and (end := output.index(output[self.stop_at])) < self.max_tokens:
            return output[: end + 1], "stop"
        return output[: self.max_tokens], "length"


@dataclass(frozen=True)
class Schedule:
    """preempt: (engine step, which of the requests that run then loses its row). drafts: tokens proposed a step, where some are; turns:
    fewer of them after some steps; wrong: every so manieth is."""

    wishes: tuple[Wish, ...]
    page_size: int
    pages: int
    rows: int
    tokens: int
    mixed_tokens: int
    device_seed: int
    preempt: tuple[tuple[int, int], ...]
    drafts: int
    turns: tuple[int, ...]
    wrong: int


wishes = st.builds(
    Wish,
    length=st.one_of(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48]), st.integers(18, LONGEST), st.integers(1, LONGEST)),
    salt=st.sampled_from([0, 0, 1]),  # prompts of one salt begin alike
    style=st.integers(0, len(STYLES) - 1),
    max_tokens=st.one_of(st.integers(8, MAX_OUTPUT), st.integers(1, MAX_OUTPUT)),
    stop_at=st.one_of(st.none(), st.none(), st.integers(0, MAX_OUTPUT - 1)),
    arrival=st.integers(0, 16),
    abort=st.one_of(st.none(), st.none(), st.integers(0, 25)),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    page_size = draw(st.sampled_from([4, 8, 16, 32]))
    least = -(-(LONGEST + MAX_OUTPUT) // page_size)  # holds any one request
    return Schedule(
        wishes=tuple(draw(st.lists(wishes, min_size=3, max_size=7))),
        page_size=page_size,
        pages=draw(st.integers(least, 2 * least)),
        rows=draw(st.integers(2, 6)),
        tokens=draw(st.integers(5, 96)),
        mixed_tokens=draw(st.sampled_from([512, 512, 3, 11])),
        device_seed=draw(st.integers(0, 2**16)),
        preempt=tuple(draw(st.lists(st.tuples(st.integers(2, 20), st.integers(0, 4)), min_size=1, max_size=4))),
        drafts=draw(st.integers(1, 4)),
        turns=draw(st.sampled_from([(), (), (3, 0, 1)])),
        wrong=draw(st.sampled_from([1, 2, 3, 5, 99])),
    )


def script(wrong: int) -> Callable[[Request], list[int]]:
    """A drafter's script: the reference output, of which every token that the number divides is another one."""

    def propose(request: Request) -> list[int]:
        params = request.params.model_copy(update={"max_tokens": MAX_OUTPUT, "stop_token_ids": ()})
        output = ref(dense(), request.prompt_token_ids, params).token_ids
        return [(token + 1) % 331 if place % wrong == 0 else token for place, token in enumerate(output, start=len(request.id))]

    return propose


@dataclass(frozen=True)
class Run:
    """outputs: ids and finish reason of each request. preemptions, cached_tokens, drafted, accepted: counted by the engine."""

    outputs: Sequence[tuple[list[int], str]]
    preemptions: int
    cached_tokens: int
    drafted: int
    accepted: int


def run(
    schedule: Schedule,
    *,
    depth: int = 2,
    chunked: bool = True,
    prefix: bool = True,
    preempt: bool = False,
    graphs: bool = False,
    drafts: bool = False,
    **load: int,
) -> Run:
    """Run a schedule on the deferred device, freed pages poisoned, with the engine's books checked after each step and at the end. load:
    options by which how many drafts there are depends on how many requests decode."""
    tokens = schedule.tokens if chunked else 256
    subject, speculation = dense(), {}
    if drafts:
        plugin = ScriptDrafterPlugin(script(schedule.wrong), schedule.turns)
        subject, speculation = replace(subject, plugins=(*subject.plugins, plugin)), {"drafter": "script", "drafts": schedule.drafts} | load
    engine = subject.engine(
        depth=depth,
        rows=schedule.rows,
        pages=schedule.pages,
        page_size=schedule.page_size,
        tokens=max(tokens, schedule.rows),
        mixed_tokens=schedule.mixed_tokens,
        chunked=chunked,
        prefix=prefix,
        device="deferred_cpu",
        device_seed=schedule.device_seed,
        captures=graphs,
        **speculation,
    )
    driver = Driver(engine)
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    last = max([*(wish.arrival for wish in schedule.wishes), *(wish.abort or 0 for wish in schedule.wishes)])
    while driver.steps <= last or engine.has_unfinished():
        for number, wish in enumerate(schedule.wishes):
            if wish.arrival == driver.steps:
                driver.add(str(number), wish.prompt, wish.params())
            if wish.abort == driver.steps:
                engine.abort(str(number))
        for step, which in schedule.preempt if preempt else ():
            if step == driver.steps:
                probe.drain()
                if running := [name for name in engine.requests if probe.row_of(name) >= 0]:
                    probe.preempt(running[which % len(running)])
        driver.step()
        assert driver.steps < 3000, "the schedule does not end"
    outputs = [driver.result(str(number)) for number in range(len(schedule.wishes))]
    counters, stats = probe.counters(), engine.scheduler.stats
    probe.assert_clean()
    engine.close()
    results = [(list(o.token_ids), str(o.finish_reason)) for o in outputs]
    return Run(results, counters.preemptions, counters.cached_tokens, stats.num_drafted, stats.num_accepted)


def assert_expected(schedule: Schedule, result: Run) -> None:
    """Every request has its reference output; an aborted one a beginning of it."""
    for wish, (ids, reason) in zip(schedule.wishes, result.outputs, strict=True):
        want, want_reason = wish.expected()
        aborted = reason == "abort"
        assert not aborted or wish.abort is not None
        same = assert_tokens(dense(), wish.prompt, ids, want[: len(ids)] if aborted else want, greedy=STYLES[wish.style] is GREEDY)
        assert aborted or not same or reason == want_reason


EXAMPLES = 40  # of each of the seven equalities
equality = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.slow


def finished(result: Run) -> list[list[int] | None]:
    """Ids of the requests that were not aborted: when an abort takes effect depends on the settings."""
    return [None if reason == "abort" else ids for ids, reason in result.outputs]


def assert_equal(schedule: Schedule, one: Run, other: Run) -> None:
    for result in (one, other):
        assert_expected(schedule, result)
    for wish, ids, others in zip(schedule.wishes, finished(one), finished(other), strict=True):
        if ids is not None and others is not None:
            assert_tokens(dense(), wish.prompt, ids, others, greedy=STYLES[wish.style] is GREEDY)


@equality
@given(schedules())
def test_depth_3_is_depth_2_is_depth_1(schedule: Schedule) -> None:
    plain, two, three = (run(schedule, depth=depth) for depth in (1, 2, 3))
    assert_equal(schedule, plain, two)
    assert_equal(schedule, plain, three)


@equality
@given(schedules())
def test_graphs_are_eager(schedule: Schedule) -> None:
    assert_equal(schedule, run(schedule), run(schedule, depth=3, preempt=True, graphs=True))


@equality
@given(schedules())
def test_chunked_is_whole(schedule: Schedule) -> None:
    assert_equal(schedule, run(schedule, chunked=False, depth=3), run(schedule, depth=3))


@equality
@given(schedules())
def test_alone_is_in_a_batch(schedule: Schedule) -> None:
    """The reference is each request alone; a second run in reversed order changes everybody's neighbours."""
    backwards = replace(schedule, wishes=schedule.wishes[::-1])
    assert_expected(schedule, run(schedule))
    assert_expected(backwards, run(backwards))


@equality
@given(schedules())
def test_prefix_cache_on_is_off(schedule: Schedule) -> None:
    off, on = run(schedule, prefix=False), run(schedule, prefix=True)
    assert off.cached_tokens == 0
    event(f"cache hits: {on.cached_tokens > 0}")
    assert_equal(schedule, off, on)


@equality
@given(schedules())
def test_preempted_is_not(schedule: Schedule) -> None:
    calm, disturbed = run(schedule), run(schedule, preempt=True)
    event(f"preempted: {disturbed.preemptions > 0}")
    assert_equal(schedule, calm, disturbed)


@equality
@given(schedules())
def test_drafts_change_no_token(schedule: Schedule) -> None:
    """Greedy and drawn tokens alike: a drawn one depends on its place, not on how many came in its step."""
    plain, drafted = run(schedule, depth=1), run(schedule, depth=1, drafts=True)
    event(f"accepted: {drafted.accepted > 0}, rejected: {drafted.drafted > drafted.accepted}")
    assert_equal(schedule, plain, drafted)
    assert_equal(schedule, plain, run(schedule, depth=2, drafts=True, preempt=True))
    assert_equal(schedule, plain, run(schedule, depth=3, drafts=True, graphs=True, spare_tokens=12))
    assert_equal(schedule, plain, run(schedule, depth=3, drafts=True, chunked=False, prefix=False, preempt=True, off_above_rows=2))


def test_the_schedules_contain_what_they_are_about() -> None:
    """A pass means nothing unless requests were preempted, aborted in mid-run, found cached pages, and had drafts kept and
    not kept."""
    seen = {"preempted": 0, "cached": 0, "aborted": 0, "accepted": 0, "rejected": 0}

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schedules())
    def look(schedule: Schedule) -> None:
        result = run(schedule, preempt=True)
        seen["preempted"] += result.preemptions > 0
        seen["cached"] += result.cached_tokens > 0
        drafted = run(schedule, drafts=True)
        seen["accepted"] += drafted.accepted > 0
        seen["rejected"] += drafted.drafted > drafted.accepted
        seen["aborted"] += any(reason == "abort" and ids for ids, reason in result.outputs)

    look()
    assert min(seen.values()) >= 5, seen
