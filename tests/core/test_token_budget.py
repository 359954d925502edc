"""Long prompts beside decoding rows: how many tokens a step gets, and that everybody goes on."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_world import World, expect, prompt, request

from modelrunner import token_budget
from modelrunner.model_state import FullAttention, SlidingWindow
from modelrunner.page_pool import page_layout
from modelrunner.request import Request
from modelrunner.token_budget import TokenBudget, usual_context


@pytest.mark.parametrize(
    ("num_decode", "num_prompts", "tokens"),
    [
        (0, 3, 100),  # nobody is held up
        (16, 0, 100),
        (47, 3, 100),  # few decode beside so many prompts
        (32, 2, 62),
        (16, 1, 60),
        (45, 1, 75),  # prompts keep half of it
        (95, 1, 100),
    ],
)
def test_tokens_of_a_step(num_decode: int, num_prompts: int, tokens: int) -> None:
    assert TokenBudget(100, 60).tokens(num_decode, num_prompts) == tokens
    assert TokenBudget(100, None).tokens(num_decode, num_prompts) == 100


@pytest.mark.parametrize(
    ("num_decode", "cached", "tokens"),
    [(64, 0, 512), (64, 10**6, 512), (96, 1500, 768), (128, 1500, 768), (128, 10**6, 1024), (128, 1000, 512), (4096, 10**6, 16384)],
)
def test_many_rows_that_read_much_share_longer_steps_with_prompts(num_decode: int, cached: int, tokens: int) -> None:
    assert TokenBudget(16384, 512, 1000).tokens(num_decode, 1, cached) == tokens
    assert TokenBudget(16384, 512).tokens(num_decode, 1, cached) == max(512, num_decode + 256)
    assert TokenBudget(16384, 512, 1000).tokens(num_decode, num_decode, cached) == 16384


@pytest.fixture
def four_are_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """For small worlds."""
    monkeypatch.setattr(token_budget, "CROWD", 4)


def test_what_a_model_usually_reads() -> None:
    """Six times its weights, of the groups that see all tokens: 2 layers of 2 x 4 x 8 elements of 2 bytes, 256 bytes a token."""
    full = FullAttention(name="full", layers=(0, 1), num_heads=4, num_kv_heads=4, head_dim=8, scale=1.0)
    window = SlidingWindow(name="near", layers=(2, 3), num_heads=4, num_kv_heads=4, head_dim=8, scale=1.0, window_size=16)
    page_bytes, layouts = page_layout([full, window], 16, itemsize=2)
    assert usual_context(25_600, layouts, page_bytes) == 600
    assert usual_context(25_600, layouts[1:], page_bytes) is None
    assert usual_context(1, layouts, page_bytes) == 1


@pytest.mark.usefixtures("four_are_a_crowd")
@pytest.mark.parametrize("usual", [None, 4])
def test_the_scheduler_counts_cached_tokens(usual: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of more than 8 tokens read eight times what is usual."""
    monkeypatch.setattr(token_budget, "USUAL_ROWS", 1)
    world = World(budget=64, depth=1, max_rows=6, pages=60, options={"max_mixed_tokens": 6, "usual_context": usual})
    early = [request(f"r{k}", prompt(8, k), 30) for k in range(4)]
    late = request("c", prompt(30, 3), 2)
    steps = run(world, early, late, after=4)
    beside = [tokens for rows, tokens in steps[1:] if tokens]
    assert beside == ([3] * 10 if usual is None else [20, 10])
    for each in (*early, late):
        expect(each)


def run(world: World, requests: list[Request], late: Request, after: int) -> list[tuple[int, int]]:
    """Steps until all have finished, as (decoding rows, prompt tokens); `late` comes after some steps."""
    for each in requests:
        world.scheduler.add(each)
    steps: list[tuple[int, int]] = []
    while world.scheduler.has_work or after >= len(steps):
        if len(steps) == after:
            world.scheduler.add(late)
        plan = world.step()
        if plan is not None:
            steps.append((plan.num_decode, int(np.sum(plan.num_query[plan.num_decode :]))))
        assert len(steps) < 200
    return steps


@pytest.mark.usefixtures("four_are_a_crowd")
@pytest.mark.parametrize("depth", [1, 3])
def test_a_late_prompt_comes_in_small_chunks(depth: int) -> None:
    world = World(budget=32, depth=depth, max_rows=5, pages=60, options={"max_mixed_tokens": 6})
    early = [request(f"r{k}", prompt(3 + k % 2, k), 30) for k in range(4)]
    late = request("c", prompt(30, 3), 2)
    steps = run(world, early, late, after=4)
    assert steps[0] == (0, 14)
    beside = [tokens for rows, tokens in steps[1:] if tokens]
    assert beside == [3] * 10
    for each in (*early, late):
        expect(each)


@pytest.mark.usefixtures("four_are_a_crowd")
def test_without_chunks_it_does_not_count() -> None:
    world = World(budget=34, depth=1, max_rows=5, pages=60, options={"max_mixed_tokens": 6, "chunked_prefill": False})
    late = request("c", prompt(30, 3), 2)
    steps = run(world, [request(f"r{k}", prompt(3, k), 20) for k in range(4)], late, after=4)
    assert (4, 30) in steps
    expect(late)


@pytest.mark.usefixtures("four_are_a_crowd")
def test_many_prompts_beside_few_rows_get_the_whole_step() -> None:
    world = World(budget=16, depth=1, max_rows=6, pages=60, options={"max_mixed_tokens": 4})
    world.scheduler.add(request("a", prompt(3, 1), 40))
    world.step()
    crowd = [request(f"r{k}", prompt(12, k), 3) for k in range(4)]
    for each in crowd:
        world.scheduler.add(each)
    plan = world.step()
    assert plan is not None
    assert (plan.num_decode, plan.num_tokens) == (1, 16)
    world.finish(300)
    for each in crowd:
        expect(each)
