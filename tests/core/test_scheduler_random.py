"""Random schedules of arrivals, aborts, preemptions and failed launches: every request gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import FULL, SHAPE, World, prompt, reference, request

from modelrunner.admission import Admission
from modelrunner.errors import RequestError
from modelrunner.model_state import SlidingWindow
from modelrunner.page_pool import GroupLayout
from modelrunner.request import Request


@st.composite
def worlds(draw: st.DrawFn, drafts: bool = False) -> World:
    size = draw(st.sampled_from([2, 3, 4]))
    groups = [GroupLayout(FULL, size)]
    if draw(st.booleans()):
        window = SlidingWindow("window", **SHAPE, window_size=draw(st.integers(1, 8)))
        groups.insert(draw(st.integers(0, 1)), GroupLayout(window, size * draw(st.integers(1, 2))))
    options = {
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "prefix_caching": draw(st.booleans()),
        "chunked_prefill": draw(st.booleans()),
    }
    speculation = {"drafts": draw(st.integers(1, 4)), "off_above_rows": draw(st.sampled_from([None, None, 2]))} if drafts else {}
    return World(
        groups, draw(st.integers(16, 40)), draw(st.integers(1, 4)), 32, draw(st.integers(1, 3)), draw(st.sampled_from([5, 16])), 2, options,
        **speculation,
    )  # fmt: skip


ARRIVAL = st.tuples(st.just("add"), st.integers(1, 14), st.integers(0, 2), st.integers(1, 12), st.integers(0, 2), st.booleans())
OTHER = st.tuples(st.sampled_from(["step", "step", "step", "abort", "abort planned", "fail", "preempt", "reset"]), st.integers(0, 30))


class Player:
    """Acts on a world and remembers what must come out."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[Request] = []
        self.aborted: dict[str, list[int]] = {}

    def add(self, length: int, seed: int, max_tokens: int, priority: int, stops: bool) -> None:
        stop, own = (3, 7, 11) if stops else (), (99, 99, 1, 0)[(length + max_tokens) % 4]  # drafts that the request lets be made
        r = request(f"r{len(self.requests)}", prompt(14, seed)[:length], max_tokens, priority=priority, stop=stop, num_draft=own)
        try:
            self.world.scheduler.add(r)
        except RequestError:
            return
        self.requests.append(r)

    def abort(self, index: int) -> None:
        r = self.requests[index % len(self.requests)]
        if self.world.scheduler.finish(r, "abort"):
            self.aborted[r.id] = list(r.output_token_ids)
        self.world.scheduler.check()

    def play(self, name: str, *arguments: Any) -> None:
        world = self.world
        if name == "add":
            self.add(*arguments)
        elif name == "reset":
            world.scheduler.reset_prefix_cache(bytes(arguments))
        elif name == "step":
            for _ in range(arguments[0] % 4 + 1):
                world.step()
        elif name == "fail":
            world.fail_launch = True
            world.step()
            world.fail_launch = False
        elif self.requests:
            self.disturb(name, arguments[0])

    def disturb(self, name: str, index: int) -> None:
        world = self.world
        if name == "abort":
            self.abort(index)
        elif name == "abort planned":
            world.fail_launch = index % 2 == 0
            world.before_launch = lambda plan: self.abort(index)
            world.step()
            world.fail_launch, world.before_launch = False, lambda plan: None
        else:
            world.collect(0)
            world.scheduler.preempt(self.requests[index % len(self.requests)].id)
            world.scheduler.check()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(), st.lists(ARRIVAL | OTHER, min_size=15, max_size=60))
def test_random_schedules_give_the_tokens_of_each_request_alone(world: World, events: list[tuple[Any, ...]]) -> None:
    play(world, events)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(drafts=True), st.lists(ARRIVAL | OTHER, min_size=15, max_size=60))
def test_random_schedules_with_drafts(world: World, events: list[tuple[Any, ...]]) -> None:
    play(world, events)
    stats = world.scheduler.stats
    assert stats.num_accepted <= stats.num_drafted


def watch_growth(admission: Admission) -> None:
    """What admission takes for the most that rows may still need is never less than what they need."""
    rows = admission._rows
    guess = rows.most_growth

    def guessed(num_active: int) -> float:
        assert num_active == rows.active.sum()
        found = guess(num_active)
        assert found >= rows.next_growth()
        return found

    vars(rows)["most_growth"] = guessed


def play(world: World, events: list[tuple[Any, ...]]) -> None:
    player = Player(world)
    watch_growth(world.scheduler.admission)
    for event in events:
        player.play(*event)
    world.finish()
    for r in player.requests:
        whole = reference(r.prompt_token_ids, r.limit, r.params.stop_token_ids)
        if r.id in player.aborted:
            assert (r.finish_reason, r.output_token_ids) == ("abort", player.aborted[r.id])
            assert r.output_token_ids == whole[: len(r.output_token_ids)]
        else:
            assert r.output_token_ids == whole
            assert r.finish_reason == ("stop" if whole[-1] in r.params.stop_token_ids else "length")
            assert world.finished.count(r) == 1
    assert world.scheduler.stats.generated_tokens == sum(len(r.output_token_ids) for r in player.requests)
