"""Single behaviours of the scheduler: admission, preemption, rollback, finishing, seats, deadlines, limits, host cost."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from scheduler_world import FULL, SHAPE, World, expect, prompt, reference, request

from modelrunner.batch import Drain, Feature, Finish, Outcome, Plan
from modelrunner.errors import RequestError
from modelrunner.model_state import SlidingWindow
from modelrunner.page_pool import GroupLayout
from modelrunner.request import Request, Status


def submit(world: World, *requests: Request) -> tuple[Request, ...]:
    for r in requests:
        world.scheduler.add(r)
    return requests


def planned(world: World, **options: Any) -> Plan:
    plan = world.scheduler.plan(**options)
    assert isinstance(plan, Plan)
    return plan


# ---- the plan ------------------------------------------------------------------------------------------------------


def test_decode_rows_come_first_and_a_prompt_takes_what_is_left_of_the_budget() -> None:
    world = World(budget=8, depth=1)
    a, b = submit(world, request("a", prompt(3, 1), 20), request("b", prompt(20, 2), 2, features=int(Feature.PLAIN)))
    plan = world.step()
    assert plan is not None
    assert (plan.num_query.tolist(), plan.num_decode, plan.max_seq_len, plan.features) == ([3, 5], 0, 5, Feature.PLAIN)
    plan = world.step()
    assert plan is not None
    assert (plan.rows.tolist(), plan.num_query.tolist(), plan.num_decode) == ([a.row, b.row], [1, 7], 1)
    assert (plan.num_tokens, plan.max_query, plan.max_seq_len, plan.table_pages) == (8, 7, 12, (3,))
    world.finish()
    expect(a), expect(b)


def test_more_decoding_rows_than_budget_take_turns() -> None:
    world = World(budget=2, max_rows=4, depth=2)
    requests = submit(world, *(request(f"r{k}", prompt(1, k), 8) for k in range(4)))
    world.finish(40)
    for r in requests:
        expect(r)


def test_nothing_to_run_is_no_plan() -> None:
    world = World()
    assert world.scheduler.plan() is None
    (r,) = submit(world, request("a", prompt(4, 1), 1))
    world.launch(planned(world))
    assert world.scheduler.plan() is None, "the only row reaches its limit with the step in flight"
    world.collect(0)
    expect(r)
    assert not world.scheduler.has_work


def test_a_whole_prompt_is_one_chunk_without_chunked_prefill() -> None:
    world = World(budget=8, depth=1, options={"chunked_prefill": False})
    a, b = submit(world, request("a", prompt(6, 1), 3), request("b", prompt(6, 2), 3))
    plan = world.step()
    assert plan is not None
    assert plan.num_query.tolist() == [6], "two more tokens would fit, six do not"
    with pytest.raises(RequestError, match=r"9 prompt tokens.*8 tokens"):
        world.scheduler.add(request("c", prompt(9, 1), 1))
    world.finish()
    expect(a), expect(b)


def test_priority_orders_admission_and_preemption() -> None:
    world = World(pages=6, depth=1, options={"policy": "priority"})
    low, high = submit(world, request("low", prompt(8, 1), 12, priority=5), request("high", prompt(8, 2), 12, priority=1))
    while not (low.num_preemptions or high.num_preemptions):
        world.step()
    assert (low.num_preemptions, high.status) == (1, Status.RUNNING), "the low one arrived first, but gives way"
    world.finish()
    assert [r.id for r in world.finished] == ["high", "low"]
    expect(low), expect(high)


# ---- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("count", [2, 6])
def test_requests_that_do_not_fit_together_finish_without_much_work_done_twice(count: int, caching: bool) -> None:
    world = World([GroupLayout(FULL, 16)], pages=10, max_model_len=128, budget=32, max_rows=8, options={"prefix_caching": caching})
    requests = submit(world, *(request(f"r{k}", prompt(60, k), 40) for k in range(count)))
    world.finish(600)
    for r in requests:
        expect(r)
    assert world.scheduler.stats.preemptions >= 1
    assert world.scheduler.stats.computed_tokens < 2 * count * 100


def test_pages_that_run_out_drain_before_anyone_is_preempted() -> None:
    world = World(pages=6, depth=2)
    newest = submit(world, request("a", prompt(8, 1), 12), request("b", prompt(8, 2), 12))[1]
    plan = world.scheduler.plan()
    while not isinstance(plan, Drain):
        assert plan is not None
        world.launch(plan)
        world.collect(1)
        plan = world.scheduler.plan()
    assert world.scheduler.stats.preemptions == 0
    world.collect(0)
    assert planned(world, drained=True).num_rows == 1
    assert (newest.status, newest.num_preemptions) == (Status.PREEMPTED, 1)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    world = World([GroupLayout(FULL, 16)], pages=12, max_model_len=256)
    with pytest.raises(RequestError, match=r"250 tokens \(100 prompt, up to 150 output\).*12 pages hold 193 tokens"):
        world.scheduler.add(request("big", prompt(100, 1), 150))
    with pytest.raises(RequestError, match="at most 256 tokens"):
        world.scheduler.add(request("long", prompt(250, 1), 10))
    (fits,) = submit(world, request("fits", prompt(100, 1), 93))
    world.finish()
    expect(fits)


def test_a_request_that_fills_the_pool_to_the_last_slot_runs() -> None:
    """Its last token is never computed, so it needs no place in the cache."""
    world = World(pages=2)
    (r,) = submit(world, request("a", prompt(8, 1), 1))
    world.finish(10)
    expect(r)


@pytest.mark.parametrize(("pages", "chunks"), [(7, [[8], [8], [4], [1], [6]]), (8, [[8], [8], [4, 4], [1, 2]])])
def test_pages_for_the_next_token_of_running_rows_are_not_given_away(pages: int, chunks: list[list[int]]) -> None:
    """The long prompt fills 5 pages and its first token needs a sixth; the short one needs 2."""
    world = World(pages=pages, budget=8, depth=1)
    long, short = submit(world, request("long", prompt(20, 1), 2), request("short", prompt(6, 2), 2))
    seen = []
    while len(seen) < len(chunks):
        plan = world.step()
        seen.append(plan.num_query.tolist() if plan is not None else [])
    assert seen == chunks
    world.finish()
    assert world.scheduler.stats.preemptions == 0
    expect(long), expect(short)


def test_a_window_lets_a_long_request_run_in_few_pages() -> None:
    window = SlidingWindow("window", **SHAPE, window_size=6)
    world = World([GroupLayout(window, 4)], pages=7, max_model_len=64, budget=12, depth=3)
    (r,) = submit(world, request("a", prompt(30, 1), 30))
    world.finish()
    expect(r)
    assert world.scheduler.stats.preemptions == 0


# ---- prefix hits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (4, 0), (1, 0), (12, 8)])
def test_a_cached_prompt_leaves_at_least_one_token_to_compute(length: int, cached: int) -> None:
    world = World()
    first, second = request("a", prompt(length, 1), 3), request("b", prompt(length, 1), 3)
    submit(world, first)
    world.finish()
    submit(world, second)
    world.finish()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    expect(first), expect(second)


def test_salt_and_weights_keep_caches_apart() -> None:
    world = World()
    cached = []
    for name, salt in [("a", None), ("b", "x"), ("c", "x"), ("d", None)]:
        (r,) = submit(world, request(name, prompt(12, 1), 2, cache_salt=salt))
        world.finish()
        cached.append(r.num_cached_tokens)
    assert cached == [0, 0, 8, 8]
    adapted, again = request("e", prompt(12, 1), 2, extra={"adapter": "x"}), request("f", prompt(12, 1), 2)
    submit(world, adapted)
    world.scheduler.reset_prefix_cache(b"new weights")
    submit(world, again)
    world.finish()
    assert (adapted.num_cached_tokens, again.num_cached_tokens) == (0, 0)


@pytest.mark.parametrize("total", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_request_resumes_from_its_own_pages(total: int, caching: bool) -> None:
    world = World(depth=1, options={"prefix_caching": caching})
    (r,) = submit(world, request("a", prompt(5, 1), 20))
    while world.scheduler.rows.known[r.row] < total:
        world.step()
    stats = world.scheduler.stats
    computed, cached = stats.computed_tokens, stats.cached_tokens
    assert world.scheduler.preempt("a")
    assert (r.status, r.row, len(r.output_token_ids)) == (Status.PREEMPTED, -1, total - 5)
    world.step()
    hit = stats.cached_tokens - cached
    assert hit == ((total - 1) // 4 * 4 if caching else 0)
    world.collect(0)
    assert stats.computed_tokens - computed == min(total - hit, world.budget) >= 1
    world.finish()
    expect(r)
    assert (r.num_cached_tokens, r.num_preemptions) == (0, 1)


def test_only_computed_pages_of_a_stopped_row_are_cached() -> None:
    """The step in flight when a row stops writes nothing, so the page that it would have filled is not full."""
    tokens = prompt(3, 5)
    stop = reference(tokens, 4)[0]
    world = World(depth=2)
    (r,) = submit(world, request("a", tokens, 9, stop=(stop,)))
    world.finish()
    assert (r.finish_reason, r.stop_reason, r.output_token_ids) == ("stop", stop, [stop])
    assert not world.pool._indexed.any(), "three of four tokens were computed"


def test_pages_of_a_row_whose_numbers_went_bad_are_forgotten() -> None:
    world = World(depth=1)
    (r,) = submit(world, request("a", prompt(9, 1), 4))
    plan = planned(world)
    world.launch(plan)
    world.tickets.clear()
    record = [[r.row, 1, 1, int(Finish.ERROR), -1, 0]]
    world.commit(Outcome(plan, np.array(record, np.int32)))
    assert (r.finish_reason, r.output_token_ids) == ("error", [])
    assert not world.pool._indexed.any()


# ---- finishing and rolling back ------------------------------------------------------------------------------------


def test_a_host_decided_end_cuts_the_output_and_drops_later_records() -> None:
    world = World(depth=3)
    a, b = submit(world, request("a", prompt(4, 1), 20), request("b", prompt(4, 2), 20))
    while world.scheduler.tokens_of(a).size < 5:
        world.step()
    assert world.scheduler.num_in_flight == 2
    assert world.scheduler.finish(a, "stop", stop_reason="end", keep_output=3)
    assert not world.scheduler.finish(a, "abort"), "it has ended already"
    assert (a.finish_reason, a.stop_reason, a.output_token_ids) == ("stop", "end", reference(a.prompt_token_ids, 7))
    world.finish()
    assert a.output_token_ids == reference(a.prompt_token_ids, 7)
    assert world.finished == [b]
    expect(b)


def test_a_stop_string_in_the_last_token_overrules_the_length() -> None:
    world = World()
    (r,) = submit(world, request("a", prompt(4, 1), 5))
    world.finish()
    assert r.finish_reason == "length"
    assert not world.scheduler.finish(r, "stop", stop_reason="end", keep_output=4)
    assert (r.finish_reason, r.stop_reason, len(r.output_token_ids)) == ("stop", "end", 4)


def test_a_failed_launch_is_as_if_it_had_not_been_planned() -> None:
    world = World(depth=1, budget=8)
    a, b = submit(world, request("a", prompt(4, 1), 12), request("b", prompt(20, 1), 3))
    for _ in range(3):
        world.step()
    (late,) = submit(world, request("late", prompt(5, 3), 2))
    rows = world.scheduler.rows
    before = [x.copy() for x in (rows.known_upper, rows.computed_upper, rows.tables[0].pages, rows.last_ticket)]
    stats = str(world.scheduler.stats)
    plan = planned(world)
    world.scheduler.rollback(plan)
    world.scheduler.check()
    kept = np.array([a.row, b.row])
    for old, new in zip(before, (rows.known_upper, rows.computed_upper, rows.tables[0].pages, rows.last_ticket), strict=True):
        assert np.array_equal(old[kept], new[kept])
    assert (late.status, stats) == (Status.WAITING, str(world.scheduler.stats))
    with pytest.raises(RuntimeError, match="not the newest plan"):
        world.scheduler.rollback(plan)
    world.finish()
    expect(a), expect(b), expect(late)


def test_a_row_that_grew_and_was_aborted_before_a_failed_launch_gives_its_pages_back_once() -> None:
    world = World(depth=1)
    a, b = submit(world, request("a", prompt(4, 1), 8), request("b", prompt(4, 2), 8))
    world.step()
    plan = planned(world)
    assert plan.patch.length.size == 2, "both rows get their second page"
    world.scheduler.finish(a, "abort")
    world.scheduler.rollback(plan)
    world.scheduler.check()
    world.finish()
    expect(b)


def test_a_plugin_that_fails_at_admission_ends_only_that_request() -> None:
    def on_admit(row: int, r: Request, resumed: bool) -> dict[str, Any]:
        if r.id == "raises":
            raise ValueError("no adapter")
        return {"no such column": 1} if r.id == "unknown" else {}

    world = World(on_admit=on_admit)
    raises, unknown, good = submit(world, *(request(n, prompt(4, k), 3) for k, n in enumerate(["raises", "unknown", "good"])))
    world.step()
    assert world.scheduler.expire(0.0) == [raises, unknown]
    assert (raises.finish_reason, raises.stop_reason) == ("error", "ValueError: no adapter")
    assert "no such column" in str(unknown.stop_reason)
    world.finish()
    expect(good)


# ---- seats, deadlines, ids -----------------------------------------------------------------------------------------


def test_a_request_waits_for_a_seat() -> None:
    world = World(seats=1)
    a, b = submit(world, request("a", prompt(4, 1), 5, stop=(1,)), request("b", prompt(4, 2), 5, stop=(2,)))
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 1)
    world.finish()
    expect(a), expect(b)
    with pytest.raises(RequestError, match="seat"):
        World(seats=0).scheduler.add(request("c", prompt(4, 1), 5, stop=(1,)))


def test_deadlines_end_requests_wherever_they_are() -> None:
    world = World(max_rows=1)
    requests = submit(world, *(request(f"r{k}", prompt(4, k), 9, deadline=float(k)) for k in range(1, 4)))
    world.step()
    assert world.scheduler.expire(0.5) == []
    assert world.scheduler.expire(2.0) == list(requests[:2])
    assert [r.finish_reason for r in requests] == ["timeout", "timeout", None]
    world.finish()
    expect(requests[2])


def test_ids_are_unique_among_unfinished_requests() -> None:
    world = World()
    submit(world, request("a", prompt(4, 1), 2))
    with pytest.raises(RequestError, match="in use"):
        world.scheduler.add(request("a", prompt(4, 1), 2))
    world.finish()
    submit(world, request("a", prompt(4, 1), 2))
    world.finish()


def test_preempting_needs_an_empty_pipeline() -> None:
    world = World(depth=2)
    submit(world, request("a", prompt(4, 1), 5))
    assert not world.scheduler.preempt("a"), "it waits"
    world.step()
    with pytest.raises(RuntimeError, match="in flight"):
        world.scheduler.preempt("a")


def calls(rows: int) -> float:
    """Python and C calls of plan and commit per step, over 64 steps of steady decoding with page growth and a sliding window."""
    window = SlidingWindow("window", **SHAPE, window_size=8)
    world = World([GroupLayout(FULL, 4), GroupLayout(window, 4)], pages=rows * 40, max_rows=512, max_model_len=128, budget=4096, depth=1)
    submit(world, *(request(f"r{k}", prompt(1 + k % 4, k), 120) for k in range(rows)))
    plan = planned(world)
    count = 0

    def on_call(frame: FrameType, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    for step in range(80):
        records = np.zeros((plan.num_rows, 6), np.int32)
        records[:, 0], records[:, 1], records[:, 2] = plan.rows, plan.generations, 1
        sys.setprofile(on_call if step >= 16 else None)
        world.scheduler.commit(Outcome(plan, records))
        plan = planned(world)
        sys.setprofile(None)
    assert plan.num_rows == plan.num_decode == rows
    return count / 64


def test_steady_decoding_costs_the_same_calls_for_any_number_of_rows() -> None:
    few, many = calls(16), calls(512)
    assert abs(many - few) <= 0.1 * few, f"{few:.0f} calls a step at 16 rows, {many:.0f} at 512"
