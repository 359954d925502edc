"""The page pool against a plain model of it, and the sharing of pages between cache groups."""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelrunner.caches import Arena, allocate_caches
from modelrunner.errors import CapacityError
from modelrunner.model_state import FullAttention, SlidingWindow
from modelrunner.page_pool import GroupLayout, PagePool, page_layout

SHAPE: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "scale": 1.0}


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_the_null_page_is_never_given_out_and_too_much_is_refused_whole() -> None:
    pool = PagePool(5)
    assert sorted(pool.alloc(4).tolist()) == [1, 2, 3, 4]
    pool.release(pages(2, 4, 0))
    with pytest.raises(CapacityError, match="3 cache pages were asked for; 2 of 4"):
        pool.alloc(3)
    assert pool.available == 2
    with pytest.raises(CapacityError, match="at least 2"):
        PagePool(1)


def test_idle_pages_are_used_last_and_the_longest_idle_first() -> None:
    pool = PagePool(6)
    a, b, c = pool.alloc(3)
    for page, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.insert(0, key, int(page))
    pool.release(pages(b, a))
    pool.release(pages(c))
    pool.alloc(2)
    assert (pool.find(0, b"a"), pool.find(0, b"b"), pool.find(0, b"c")) == (a, b, c)
    assert pool.alloc(1).tolist() == [b]
    assert pool.find(0, b"b") == 0
    pool.retain(pages(a))
    assert pool.alloc(1).tolist() == [c]
    assert pool.available == 0


def test_a_key_keeps_its_first_page_and_groups_have_keys_of_their_own() -> None:
    pool = PagePool(6)
    a, b, c = pool.alloc(3).tolist()
    pool.insert(0, b"k", a)
    pool.insert(0, b"k", b)
    pool.insert(1, b"k", c)
    assert (pool.find(0, b"k"), pool.find(1, b"k")) == (a, c)
    pool.release(pages(b))
    assert b in pool.alloc(pool.available).tolist(), "the duplicate is simply free"


def test_what_dies_is_recorded_and_what_may_be_found_again_is_not() -> None:
    pool = PagePool(4)
    pool.record_freed()
    a, b, c = pool.alloc(3).tolist()
    pool.insert(0, b"a", a)
    pool.release(pages(a, b))
    assert pool.take_freed() == [b]
    assert set(pool.alloc(2).tolist()) == {a, b}
    assert pool.take_freed() == [a]
    pool.insert(0, b"c", c)
    pool.release(pages(c))
    pool.reset_index()
    assert (pool.take_freed(), pool.find(0, b"c"), pool.available) == ([c], 0, 1)


@pytest.mark.parametrize("damage", ["owner", "lost", "twice", "index"])
def test_the_check_sees_damage(damage: str) -> None:
    pool = PagePool(5)
    a, b = pool.alloc(2).tolist()
    pool.insert(0, b"a", a)
    pool.release(pages(a))
    owners = np.zeros(5, np.int64)
    owners[b] = 1
    pool.check(owners)
    if damage == "owner":
        owners[b] = 2
    elif damage == "lost":
        pool._num_free -= 1
    elif damage == "twice":
        pool._stack[0] = pool._stack[1]
    else:
        pool._index[0, b"z"] = b
    with pytest.raises(AssertionError):
        pool.check(owners)


class PoolModel(RuleBasedStateMachine):
    """Every page's owners, kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.owned: Counter[int] = Counter()
        self.keys: dict[bytes, int] = {}

    @rule(count=st.integers(0, 4))
    def alloc(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(CapacityError):
                self.pool.alloc(count)
            return
        taken = self.pool.alloc(count).tolist()
        assert len(set(taken)) == count
        assert not any(self.owned[page] for page in taken)
        self.owned.update(taken)
        self.keys = {key: page for key, page in self.keys.items() if page not in taken}

    @precondition(lambda self: +self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted((+self.owned).elements())), max_size=6))
        counts = Counter(names) & self.owned
        self.pool.release(pages(0, *counts.elements()))
        self.owned -= counts

    @precondition(lambda self: +self.owned)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def insert(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(+self.owned)))
        self.pool.insert(0, key, page)
        if key not in self.keys and page not in self.keys.values():
            self.keys[key] = page

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        found = data.draw(st.lists(st.sampled_from(sorted(self.keys.values())), unique=True))
        self.pool.retain(pages(*found))
        self.owned.update(found)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        self.pool.forget(pages(self.keys.pop(key)))

    @invariant()
    def agrees(self) -> None:
        self.pool.check(np.bincount(list(self.owned.elements()), minlength=9))
        assert {key: self.pool.find(0, key) for key in self.keys} == self.keys
        assert sum(self.pool.find(0, key) > 0 for key in (b"a", b"b", b"c", b"d")) == len(self.keys)
        assert self.pool.available == 8 - len(+self.owned)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_groups_share_pages_of_equal_bytes() -> None:
    full = FullAttention("full", layers=(0, 1), **SHAPE)
    window = SlidingWindow("window", layers=tuple(range(10)), window_size=8, **SHAPE)
    page_bytes, layouts = page_layout([full, window], page_size=16, itemsize=2)
    assert page_bytes == 16 * 10 * 2 * 2 * 4 * 2
    assert [layout.tokens_per_page for layout in layouts] == [80, 16]
    odd = FullAttention("odd", layers=(0, 1, 2), **SHAPE)
    assert [layout.tokens_per_page for layout in page_layout([odd, window], 16, 2)[1]] == [48, 16], "53 tokens fit; whole multiples of 16"
    assert page_layout([], 16, 2)[1] == []


def test_riders_lie_behind_their_host() -> None:
    """With their host's tokens a page, and nobody's bytes in anybody else's: pages filled through each view keep what the others wrote."""
    full = FullAttention("full", layers=(0, 1), **SHAPE)
    small = FullAttention("draft.full", layers=(0,), num_heads=6, num_kv_heads=3, head_dim=4, scale=1.0)
    other = FullAttention("draft.other", layers=(0, 1, 2), num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    window = SlidingWindow("window", layers=tuple(range(10)), window_size=8, **SHAPE)
    page_bytes, layouts = page_layout([full, window], 16, 2, riders={"full": (small, other)})
    assert [[group.name for group in layout.groups] for layout in layouts] == [["full", "draft.full", "draft.other"], ["window"]]
    assert layouts[0].tokens_per_page % 16 == 0
    assert layouts[1].tokens_per_page == 16
    _, views = allocate_caches(layouts, 3, page_bytes, torch.bfloat16, torch.device("cpu"))
    assert {views[name].shape[2] for name in ("full", "draft.full", "draft.other")} == {layouts[0].tokens_per_page}
    for value, name in enumerate(("full", "draft.full", "draft.other")):
        views[name].fill_(1.0 + value)
        assert views[name].stride(0) * 2 == page_bytes
        assert views[name].stride(0) % views[name].stride(2) == 0, "operations see pages as a whole number of tokens"
    for value, name in enumerate(("full", "draft.full", "draft.other")):
        assert (views[name] == 1.0 + value).all(), name


@pytest.mark.parametrize(("tokens", "chunk", "most"), [(1, 8, 1), (8, 8, 2), (9, 8, 3), (100, 8, 5), (100, 1, 3), (0, 8, 1)])
def test_most_pages_of_a_window(tokens: int, chunk: int, most: int) -> None:
    layout = GroupLayout(SlidingWindow("window", layers=(0,), window_size=8, **SHAPE), 4)
    assert layout.most_pages(tokens, chunk) == most
    starts = np.arange(0, max(tokens - 1, 0) + 1)
    ends = np.minimum(starts + chunk, tokens)
    held = -(-ends // 4) - layout.group.needed_from(starts) // 4
    assert held.max() <= most


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_arena_on_the_host_takes_memory_as_it_is_written_and_gives_it_up() -> None:
    page_bytes, layouts = page_layout([FullAttention("full", layers=(0, 1), **SHAPE)], 16, 2)
    before, most = resident(), 1 << 28
    arena, views = allocate_caches(layouts, most // page_bytes, page_bytes, torch.bfloat16, torch.device("cpu"))
    assert arena.tensor.shape == (most // page_bytes, page_bytes)
    assert resident() - before < most // 4
    views["full"].fill_(1)
    assert resident() - before > most // 2
    arena.free()
    assert resident() - before < most // 4
    arena.restore()
    assert not views["full"].any()
    views["full"].fill_(1)
    assert arena.tensor.any()


def test_an_arena_on_a_device_is_a_whole_number_of_its_allocators_blocks() -> None:
    """Then nothing else lies in its last one, and all of it goes back, also after it came again."""
    arena = Arena(3, 1000, torch.device("meta"))
    storage = arena.tensor.untyped_storage()
    whole = storage.nbytes()
    assert (arena.tensor.shape, whole % 2**21, whole >= 3000) == ((3, 1000), 0, True)
    arena.free()
    assert storage.nbytes() == 0
    arena.restore()
    assert storage.nbytes() == whole
