"""Page keys keep worlds and sequences apart; a hit is the longest prefix that every group can serve."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from modelrunner.model_state import CacheGroup, FullAttention, SlidingWindow
from modelrunner.page_pool import GroupLayout, PagePool
from modelrunner.prefix_cache import PageKeys, PrefixCache, root_key

SHAPE: dict[str, Any] = {"layers": (0,), "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "scale": 1.0}
FULL = FullAttention("full", **SHAPE)
WINDOW = SlidingWindow("window", window_size=6, **SHAPE)
TOKENS = np.arange(24, dtype=np.int32)


def filled(*layouts: tuple[CacheGroup, int], tokens: np.ndarray = TOKENS) -> tuple[PrefixCache, PagePool, list[np.ndarray]]:
    """A cache that holds all full pages of `tokens`, with the pages per group."""
    pool = PagePool(64)
    groups = [GroupLayout(group, size) for group, size in layouts]
    cache = PrefixCache(groups, pool)
    keys, tables = PageKeys(b"root"), []
    for index, layout in enumerate(groups):
        count = tokens.size // layout.tokens_per_page
        tables.append(pool.alloc(count))
        cache.insert(index, keys.extend(tokens, layout.tokens_per_page, count), tables[-1], 0, count)
    return cache, pool, tables


def test_roots_of_different_worlds_differ() -> None:
    worlds = [(b"", None, None), (b"", "x", None), (b"", None, "x"), (b"", "x", "x"), (b"x", None, None), (b"", "", None), (b"", None, "")]
    worlds += [(b"", "xy", "z"), (b"", "x", "yz"), (b"\1", None, None), (b"", "\1", None)]
    for one, other in combinations(worlds, 2):
        assert root_key(*one) != root_key(*other), (one, other)


def test_a_key_depends_on_every_token_before_its_end_and_on_the_root() -> None:
    chain = PageKeys(b"root").extend(TOKENS, 4, 6)
    assert len(set(chain)) == 6
    assert PageKeys(b"toor").extend(TOKENS, 4, 6)[0] != chain[0]
    for at in range(24):
        other = TOKENS.copy()
        other[at] += 1000
        changed = PageKeys(b"root").extend(other, 4, 6)
        assert changed[: at // 4] == chain[: at // 4]
        assert not set(changed[at // 4 :]) & set(chain)


def test_chains_grow_without_hashing_again() -> None:
    keys = PageKeys(b"root")
    first = list(keys.extend(TOKENS, 4, 2))
    wrong_start = np.concatenate([np.zeros(8, np.int32), TOKENS[8:]])
    assert keys.extend(wrong_start, 4, 6)[:2] == first
    assert keys.extend(TOKENS, 4, 6) == PageKeys(b"root").extend(TOKENS, 4, 6)


@pytest.mark.parametrize(("length", "hit"), [(24, 20), (25, 24), (21, 20), (4, 0), (5, 4), (1, 0)])
def test_a_hit_leaves_a_token_and_ends_at_a_page(length: int, hit: int) -> None:
    cache, _, (table,) = filled((FULL, 4))
    tokens = np.arange(length, dtype=np.int32)
    found = cache.hit(PageKeys(b"root"), tokens)
    assert (found.length, found.first, found.pages[0].tolist()) == (hit, (0,), table[: hit // 4].tolist())


def test_another_sequence_hits_up_to_where_it_differs() -> None:
    cache, _, _ = filled((FULL, 4))
    tokens = TOKENS.copy()
    tokens[13] = 99
    assert cache.hit(PageKeys(b"root"), tokens).length == 12
    assert cache.hit(PageKeys(b"other"), TOKENS).length == 0


def test_groups_of_different_page_sizes_hit_at_common_lengths() -> None:
    cache, pool, (full, window) = filled((FULL, 4), (WINDOW, 8))
    found = cache.hit(PageKeys(b"root"), TOKENS)
    assert (found.length, found.first) == (16, (0, 1)), "the window of token 16 starts at 11, in the second page of 8"
    assert [pages.tolist() for pages in found.pages] == [full[:4].tolist(), window[1:2].tolist()]
    pool.forget(full[2:3])
    assert cache.hit(PageKeys(b"root"), TOKENS).length == 8


def test_a_sequence_whose_first_page_nobody_has_is_not_hashed_further() -> None:
    cache, _, _ = filled((WINDOW, 2), (FULL, 4))
    keys, tokens = PageKeys(b"root"), TOKENS[::-1].copy()
    assert cache.hit(keys, tokens) is cache.miss
    assert {size: len(chain) for size, chain in keys.chains.items()} == {4: 1}
    assert keys.extend(tokens, 4, 6) == PageKeys(b"root").extend(tokens, 4, 6), "the rest of the chain is the same"


@pytest.mark.parametrize(("lost", "hit"), [((), 20), ((0, 1, 2), 20), ((3,), 12), ((4,), 16), ((3, 4), 12), ((1, 4), 16), ((2, 4), 8)])
def test_a_window_needs_only_its_last_pages(lost: tuple[int, ...], hit: int) -> None:
    cache, pool, (table,) = filled((WINDOW, 4))
    pool.forget(table[list(lost)])
    found = cache.hit(PageKeys(b"root"), TOKENS)
    first = max(hit - 5, 0) // 4
    assert (found.length, found.first[0], found.pages[0].tolist()) == (hit, first, table[first : hit // 4].tolist())


def test_a_model_without_a_cache_has_no_hits() -> None:
    cache = PrefixCache([], PagePool(2))
    assert cache.hit(PageKeys(b"root"), TOKENS) is cache.miss


@pytest.mark.parametrize(("same", "length"), [(24, 20), (23, 20), (21, 20), (20, 16), (19, 16), (5, 4), (4, 0)])
def test_a_page_of_a_shifted_cache_is_followed_by_the_same_token(same: int, length: int) -> None:
    """Its last entry was made from the token behind it, so that belongs to the key."""
    cache, _ = shifted_cache(TOKENS)
    tokens = TOKENS.copy()
    tokens[same:] += 100
    hit = cache.hit(PageKeys(b"root", True), tokens)
    assert hit.length == length
    assert (TOKENS[: hit.length + 1] == tokens[: hit.length + 1]).all() or not hit.length


def shifted_cache(*sequences: np.ndarray) -> tuple[PrefixCache, PagePool]:
    """A cache with all pages of four tokens that the sequences can enter, each from pages of its own."""
    pool = PagePool(64)
    cache = PrefixCache([GroupLayout(FULL, 4)], pool)
    for tokens in sequences:
        keys = PageKeys(b"root", True)
        count = keys.pages_of(tokens.size, 4)
        cache.insert(0, keys.extend(tokens, 4, count), pool.alloc(count), 0, count)
    return cache, pool


def test_pages_of_a_shifted_cache_come_from_different_sequences() -> None:
    """The page of the one that was there first must not serve the other, whose next token is another, though its own tokens are equal."""
    first, second = TOKENS[:9].copy(), TOKENS[:21]
    first[8] = 99
    cache, pool = shifted_cache(first, second)
    hit = cache.hit(PageKeys(b"root", True), TOKENS)
    keys = PageKeys(b"root", True)
    assert hit.length == 20
    assert hit.pages[0].tolist() == [pool.find(0, key) for key in keys.extend(TOKENS, 4, 5)]
    assert len({pool.find(0, PageKeys(b"root", True).extend(tokens, 4, 2)[1]) for tokens in (first, second)}) == 2
    grown = PageKeys(b"root", True)
    assert [grown.extend(TOKENS, 4, n)[n - 1] for n in range(1, 6)] == keys.extend(TOKENS, 4, 5)
