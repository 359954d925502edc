"""Long prompts beside decoding rows: how many tokens a step gets, and that everybody goes on."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_world import World, expect, prompt, request

from modelrunner.request import Request
from modelrunner.token_budget import TokenBudget


@pytest.mark.parametrize(
    ("num_decode", "num_prompts", "tokens"),
    [
        (0, 3, 100),  # nobody is held up
        (4, 0, 100),
        (11, 3, 100),  # few decode beside so many prompts
        (8, 2, 20),
        (4, 1, 20),
        (15, 1, 25),  # prompts keep half of it
        (95, 1, 100),
    ],
)
def test_tokens_of_a_step(num_decode: int, num_prompts: int, tokens: int) -> None:
    assert TokenBudget(100, 20).tokens(num_decode, num_prompts) == tokens
    assert TokenBudget(100, None).tokens(num_decode, num_prompts) == 100


@pytest.mark.parametrize(("num_decode", "tokens"), [(64, 512), (65, 520), (256, 2048), (1024, 8192), (4096, 16384)])
def test_more_rows_share_longer_steps_with_prompts(num_decode: int, tokens: int) -> None:
    assert TokenBudget(16384, 512).tokens(num_decode, 1) == tokens


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


def test_without_chunks_it_does_not_count() -> None:
    world = World(budget=34, depth=1, max_rows=5, pages=60, options={"max_mixed_tokens": 6, "chunked_prefill": False})
    late = request("c", prompt(30, 3), 2)
    steps = run(world, [request(f"r{k}", prompt(3, k), 20) for k in range(4)], late, after=4)
    assert (4, 30) in steps
    expect(late)


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
