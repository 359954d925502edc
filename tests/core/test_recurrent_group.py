"""A group whose pages hold a state: how it shares memory, what is freed, found again, and needed, beside groups that keep tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import FULL, World, prompt, reference, request

from modelrunner.attention import NoAttention
from modelrunner.caches import allocate_caches
from modelrunner.errors import PluginError
from modelrunner.model_state import CacheGroup, FullAttention, RecurrentState, SlidingWindow
from modelrunner.ops import Registry
from modelrunner.page_pool import GroupLayout, PagePool, page_layout
from modelrunner.prefix_cache import PageKeys, PrefixCache
from modelrunner.rows import BlockTable

SHAPE: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "scale": 1.0}
TOKENS = np.arange(40, dtype=np.int32)


def state(interval: int = 8, shape: tuple[int, ...] = (5,), layers: int = 1, dtype: torch.dtype | None = None) -> RecurrentState:
    return RecurrentState("state", tuple(range(layers)), shape, interval, dtype)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_large_state_makes_pages_large_and_attention_gets_more_tokens() -> None:
    full = FullAttention("full", (0,), **SHAPE)  # 16 elements a token
    page_bytes, layouts = page_layout([full, state(24, (30, 10))], page_size=4, itemsize=2)
    assert (page_bytes, [layout.tokens_per_page for layout in layouts]) == (608, [16, 24])
    assert page_layout([full, state(24, (30, 10))], 16, 2)[1][0].tokens_per_page == 16, "19 fit; whole multiples of 16"


def test_a_small_state_leaves_pages_as_they_are() -> None:
    full = FullAttention("full", (0,), **SHAPE)
    page_bytes, layouts = page_layout([full, state(12)], page_size=4, itemsize=2)
    assert (page_bytes, [layout.tokens_per_page for layout in layouts]) == (4 * 16 * 2, [4, 12])
    assert page_layout([state(3, (7,))], 4, 2)[0] == 14, "a model of states alone"


def test_pages_lie_whole_tokens_apart() -> None:
    full, window = FullAttention("full", (0,), **SHAPE), SlidingWindow("window", (1,), 1, 1, 3, 1.0, window_size=4)
    page_bytes, _ = page_layout([full, window, state(8, (131,))], page_size=4, itemsize=2)
    assert page_bytes == 288, "262 bytes of the state, in multiples of 32 (a token of full) and 12 (of the window)"


def test_each_group_sees_the_pages_in_its_own_shape_and_type() -> None:
    full, kept = FullAttention("full", (0, 2), **SHAPE), state(8, (3, 5), layers=3, dtype=torch.float32)
    page_bytes, layouts = page_layout([full, kept], page_size=4, itemsize=2)
    _, views = allocate_caches(layouts, 5, page_bytes, torch.bfloat16, torch.device("cpu"))
    assert (views["full"].shape, views["full"].dtype) == (torch.Size([5, 2, 4, 2, 2, 4]), torch.bfloat16)
    assert (views["state"].shape, views["state"].dtype) == (torch.Size([5, 3, 3, 5]), torch.float32)
    views["state"][2] = 1.0
    assert views["full"][2].any()
    assert not views["full"][[0, 1, 3, 4]].any()


def test_an_interval_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="'state': the interval is 0"):
        state(0)


def test_a_group_without_tokens_has_no_attention() -> None:
    kept = state()
    with pytest.raises(NotImplementedError, match="RecurrentState 'state' keeps nothing by the token"):
        kept.token_shape()
    nothing = torch.empty(0)
    backend = NoAttention(kept, nothing, Registry().resolve("cpu"), torch.float32)
    with pytest.raises(PluginError, match=r"'state' \(RecurrentState\) does not attend; .*caches\['state'\]"):
        backend.attend(nothing, nothing, nothing, 0, None)


# ---- what is held, freed, found --------------------------------------------------------------------------------------


def test_only_the_newest_page_is_needed() -> None:
    lengths = np.array([0, 1, 7, 8, 9, 16, 17])
    assert (state().needed_from(lengths) // 8).tolist() == [0, 0, 0, 0, 1, 1, 2]


def test_pages_are_freed_once_the_next_one_holds_the_state() -> None:
    pool, row = PagePool(20), np.array([0], np.int32)
    table = BlockTable(GroupLayout(state(), 8), 0, 1, 40)
    table.grow(row, table.deficit(row, np.array([30], np.int32)), pool)
    held = table.pages[0, :4].copy()
    for computed, freed in ((8, 0), (9, 1), (16, 1), (17, 2), (30, 3)):
        table.free_behind(row, np.array([computed], np.int32), pool)
        assert table.pages[0, :4].tolist() == [0] * freed + held[freed:].tolist(), computed
    assert pool.available == 18


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 8), (8, 8), (9, 8), (100, 8), (100, 1), (100, 30), (0, 8)])
def test_most_pages(tokens: int, chunk: int) -> None:
    layout = GroupLayout(state(), 8)
    starts = np.arange(0, max(tokens - 1, 0) + 1)
    held = -(-np.minimum(starts + chunk, tokens) // 8) - layout.group.needed_from(starts) // 8
    assert held.max() <= layout.most_pages(tokens, chunk) <= held.max() + 1


def filled(*groups: tuple[CacheGroup, int]) -> tuple[PrefixCache, PagePool, list[Any]]:
    pool, layouts = PagePool(64), [GroupLayout(group, size) for group, size in groups]
    cache, keys, tables = PrefixCache(layouts, pool), PageKeys(b"root"), []
    for index, layout in enumerate(layouts):
        count = TOKENS.size // layout.tokens_per_page
        tables.append(pool.alloc(count))
        cache.insert(index, keys.extend(TOKENS, layout.tokens_per_page, count), tables[-1], 0, count)
    return cache, pool, tables


@pytest.mark.parametrize(
    ("lost_full", "lost_state", "hit"),
    [((), (), 32), ((), (3,), 24), ((), (0, 1, 2), 32), ((), (1, 2, 3), 8), ((5,), (), 16), ((5,), (1,), 8), ((0,), (), 0)],
)
def test_a_hit_needs_all_of_attention_and_one_state(lost_full: tuple[int, ...], lost_state: tuple[int, ...], hit: int) -> None:
    cache, pool, (full, states) = filled((FULL, 4), (state(), 8))
    pool.forget(full[list(lost_full)])
    pool.forget(states[list(lost_state)])
    found = cache.hit(PageKeys(b"root"), TOKENS)
    assert found.length == hit
    if hit:
        assert found.first == (0, hit // 8 - 1)
        assert [pages.tolist() for pages in found.pages] == [full[: hit // 4].tolist(), [states[hit // 8 - 1]]]


# ---- schedules -------------------------------------------------------------------------------------------------------


ARRIVAL = st.tuples(st.integers(1, 14), st.integers(0, 2), st.integers(1, 12), st.integers(0, 4), st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4, 6, 64])), depth=st.integers(1, 3), budget=st.sampled_from([5, 16]),
    pages=st.integers(22, 40), swap=st.booleans(), caching=st.booleans(), arrivals=st.lists(ARRIVAL, min_size=3, max_size=12),
)  # fmt: skip
def test_schedules_with_states_give_the_tokens_of_each_request_alone(
    sizes: tuple[int, int], depth: int, budget: int, pages: int, swap: bool, caching: bool, arrivals: list[tuple[int, int, int, int, bool]]
) -> None:
    groups = [GroupLayout(FULL, sizes[0]), GroupLayout(state(sizes[1]), sizes[1])]
    world = World(groups[::-1] if swap else groups, pages, 3, 32, depth, budget, 2, {"prefix_caching": caching})
    requests = []
    for length, seed, max_tokens, steps, preempt in arrivals:
        requests.append(request(f"r{len(requests)}", prompt(14, seed)[:length], max_tokens))
        world.scheduler.add(requests[-1])
        for _ in range(steps):
            world.step()
        if preempt:
            world.collect(0)
            world.scheduler.preempt(requests[steps % len(requests)].id)
    world.finish()
    for r in requests:
        assert r.output_token_ids == reference(r.prompt_token_ids, r.limit)
