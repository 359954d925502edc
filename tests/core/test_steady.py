"""The steady path plans and commits what the general one does, and is taken whenever nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import FULL, SHAPE, World, expect, prompt, request
from test_scheduler_random import ARRIVAL, OTHER, Player, worlds

from modelrunner import aside
from modelrunner.aside import MOST_KEPT
from modelrunner.batch import Plan
from modelrunner.model_state import SlidingWindow
from modelrunner.page_pool import GroupLayout
from modelrunner.request import Request, Status

COUNTERS = ("known", "computed", "known_upper", "computed_upper", "known_lower", "last_ticket", "num_drafted", "num_accepted")
TABLES = ("pages", "used", "first", "indexed", "hashed")
VOCABLESS = 10_000  # a stop id that no row samples


@pytest.fixture(autouse=True)
def laid_aside_for_as_long_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is too short for what few rows would keep."""
    monkeypatch.setattr(aside, "MOST_OF_FEW", MOST_KEPT)


def general(world: World) -> World:
    """The same world, whose scheduler repeats nothing."""
    world.scheduler._repeat = lambda first: None  # type: ignore[method-assign]
    return world


def steady_world(**options: Any) -> World:
    window = SlidingWindow("window", **SHAPE, window_size=6)
    return World([GroupLayout(FULL, 4), GroupLayout(window, 8)], pages=200, max_rows=8, max_model_len=128, budget=64, **options)


def submit(world: World, count: int, tokens: int = 60) -> list[Request]:
    requests = [request(f"r{k}", prompt(1 + 2 * k, k), tokens + k) for k in range(count)]
    for r in requests:
        world.scheduler.add(r)
    return requests


def spied(world: World) -> tuple[list[Plan], list[Plan]]:
    """The plans of the world from now on, and those of them that the steady path committed."""
    plans: list[Plan] = []
    quick: list[Plan] = []
    launch, commit = world.launch, world.scheduler.commits.steady

    def noted(plan: Plan) -> None:
        launch(plan)
        plans.append(plan)

    world.launch = noted  # type: ignore[method-assign]
    world.scheduler.commits.steady = lambda outcome, steady: quick.append(outcome.plan) or commit(outcome, steady)  # type: ignore[method-assign, func-returns-value]
    return plans, quick


def contents(plan: Plan) -> tuple[Any, ...]:
    arrays = (plan.rows, plan.generations, plan.num_query, plan.patch.dst, plan.patch.length, plan.patch.words)
    numbers = (plan.num_decode, plan.num_tokens, plan.max_query, plan.features, plan.num_draft, plan.num_next)
    return plan.step, *(array.tolist() for array in arrays), *numbers


def same_plans(one: World, plans: list[Plan], want: list[Plan]) -> None:
    """Lengths of steps with drafts are bounds: repeated steps do not look up how many drafts were kept lately."""
    assert [contents(plan) for plan in plans] == [contents(plan) for plan in want]
    for plan, other in zip(plans, want, strict=True):
        assert other.max_seq_len <= plan.max_seq_len <= min(other.max_seq_len + MOST_KEPT * plan.num_draft, one.max_model_len)
        assert plan.table_pages == tuple(group.pages_for(plan.max_seq_len) for group in one.groups)


def same_books(one: World, other: World) -> None:
    a, b = one.scheduler.rows, other.scheduler.rows
    on = b.active
    assert np.array_equal(a.active, on)
    for name in COUNTERS:
        assert np.array_equal(getattr(a, name)[on], getattr(b, name)[on]), name
    for row in np.flatnonzero(on).tolist():
        assert np.array_equal(a.output(row), b.output(row)), row
    for mine, theirs in zip(a.tables, b.tables, strict=True):
        for name in TABLES:
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    assert one.scheduler.stats == other.scheduler.stats
    assert one.pool.available == other.pool.available


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("looks", [1, 5, 1000])
def test_books_and_plans_are_those_of_the_general_path(depth: int, looks: int) -> None:
    """looks: steps after which somebody reads the rows."""
    one, other = steady_world(depth=depth), general(steady_world(depth=depth))
    one.checks = other.checks = False
    requests = [submit(world, 6) for world in (one, other)]
    (plans, quick), (want, slow) = spied(one), spied(other)
    for step in range(50):
        one.step(), other.step()
        if step % looks == looks - 1:
            same_books(one, other)
    same_books(one, other)
    assert len(quick) > 40 > MOST_KEPT > len(slow) == 0
    one.finish(), other.finish()
    same_plans(one, plans, want)
    for r in requests[0]:
        expect(r)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("looks", [1, 3, 1000])
def test_books_and_plans_with_drafts_are_those_of_the_general_path(depth: int, looks: int) -> None:
    one, other = steady_world(depth=depth, drafts=2), general(steady_world(depth=depth, drafts=2))
    one.checks = other.checks = False
    requests = [submit(world, 6, tokens=100) for world in (one, other)]
    (plans, quick), (want, slow) = spied(one), spied(other)
    for step in range(45):
        one.step(), other.step()
        if step % looks == looks - 1:
            same_books(one, other)
    same_books(one, other)
    assert len(quick) >= MOST_KEPT > len(slow) == 0
    assert one.scheduler.stats.num_accepted > 100
    one.finish(), other.finish()
    same_plans(one, plans, want)
    for r in requests[0]:
        expect(r)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.booleans(), st.lists(ARRIVAL | OTHER, min_size=15, max_size=60))
def test_random_schedules_are_planned_the_same(data: st.DataObject, drafts: bool, events: list[tuple[Any, ...]]) -> None:
    one = data.draw(worlds(drafts))
    one.checks = False
    other = general(
        World(
            one.groups, one.pages, one.max_rows, one.max_model_len, one.depth, one.budget, one.seats, one.options,
            drafts=one.drafts, off_above_rows=one.off_above_rows,
        )
    )  # fmt: skip
    players, plans = [Player(one), Player(other)], [spied(one)[0], spied(other)[0]]
    for event in events:
        for player in players:
            player.play(*event)
        assert len(plans[0]) == len(plans[1])
    one.finish(), other.finish()
    same_plans(one, *plans)
    assert one.scheduler.stats == other.scheduler.stats
    assert [r.output_token_ids for r in players[0].requests] == [r.output_token_ids for r in players[1].requests]


def test_repeated_plans_share_their_arrays_which_are_sealed() -> None:
    world = steady_world(depth=1)
    submit(world, 3)
    world.step()
    plans = [world.step() for _ in range(6)]
    assert len({id(array) for plan in plans if plan is not None for array in (plan.rows, plan.generations, plan.num_query)}) == 3
    assert plans[0] is not None
    with pytest.raises(ValueError, match="read-only"):
        plans[0].rows[0] = 1


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("before", [3, 4, 5, 6])
def test_a_repeated_plan_whose_launch_failed_is_undone(before: int, abort: bool, drafts: int) -> None:
    """At one of four steps in a row some row needs a page."""
    world, other = steady_world(depth=2, drafts=drafts), general(steady_world(depth=2, drafts=drafts))
    requests = [submit(each, 3) for each in (world, other)]
    for each, (first, *_) in zip((world, other), requests, strict=True):
        each.checks = False
        for _ in range(before):
            each.step()
        plan = each.scheduler.plan()
        assert isinstance(plan, Plan)
        if abort:
            each.scheduler.finish(first, "abort")
        each.scheduler.rollback(plan)
        each.scheduler.check()
    same_books(world, other)
    world.finish(), other.finish()
    for r in requests[0][abort:]:
        expect(r)


def test_whoever_comes_is_let_in_at_once_and_whoever_goes_is_missed() -> None:
    world = steady_world(depth=2)
    world.checks = False
    requests = submit(world, 3)
    for _ in range(8):
        world.step()
    late = request("late", prompt(9, 9), 5)
    world.scheduler.add(late)
    plan = world.step()
    assert plan is not None
    assert plan.num_query.tolist() == [1, 1, 1, 9]
    for _ in range(3):
        world.step()
    world.collect(0)
    assert world.scheduler.preempt(requests[1].id)
    assert len(requests[1].output_token_ids) == world.scheduler.tokens_of(requests[0]).size
    world.finish()
    for r in (*requests, late):
        expect(r)


def test_who_waits_for_a_seat_disturbs_nobody() -> None:
    world = World(seats=1, depth=2, max_model_len=64, pages=100, budget=32)
    world.checks = False
    holder, waiter = request("a", prompt(4, 1), 40, stop=(VOCABLESS,)), request("b", prompt(4, 2), 5, stop=(VOCABLESS,))
    world.scheduler.add(holder), world.scheduler.add(waiter)
    _, quick = spied(world)
    for _ in range(20):
        world.step()
    assert waiter.status is Status.WAITING
    assert len(quick) >= 16
    world.finish()
    expect(holder), expect(waiter)
