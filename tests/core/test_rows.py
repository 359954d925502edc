"""One row's counters and pages move as those of many do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelrunner.model_state import FullAttention, SlidingWindow
from modelrunner.page_pool import GroupLayout, PagePool
from modelrunner.rows import HostRows

SHAPE: dict[str, Any] = {"layers": (0,), "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "scale": 1.0}
LAYOUTS = [GroupLayout(FullAttention("full", **SHAPE), 4), GroupLayout(SlidingWindow("window", window_size=5, **SHAPE), 2)]


def opened(known: int, computed: int, guided: bool) -> HostRows:
    rows = HostRows(LAYOUTS, 3, 64)
    rows.open(1, np.arange(known, dtype=np.int32), computed, known, 40, 0, guided)
    return rows


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("known", "computed", "count"), [(9, 0, 9), (9, 0, 8), (9, 4, 5), (1, 0, 1)])
def test_one_row_advances_as_many_do(known: int, computed: int, count: int, guided: bool) -> None:
    one, many = opened(known, computed, guided), opened(known, computed, guided)
    sampled = many.advance(np.array([1], np.int32), np.array([count], np.int32))
    assert one.advance_one(1, count) == sampled[0]
    for name, value in vars(many).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(one, name), value), name


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize(("tokens", "limit"), [(8, 40), (9, 40), (9, 9), (1, 2), (1, 1)])
def test_one_row_gets_the_pages_that_it_lacks(tokens: int, limit: int, ahead: int) -> None:
    one, many = opened(9, 0, False), opened(9, 0, False)
    pools = PagePool(30), PagePool(30)
    row, upto, end = np.array([1], np.int32), np.array([tokens], np.int32), np.array([limit], np.int32)
    for a, b in zip(one.tables, many.tables, strict=True):
        a.ahead = b.ahead = ahead
        for table, pool in ((a, pools[0]), (b, pools[1])):
            table.grow(row, np.array([1], np.int32), pool)  # it has one already
        a.start(1, tokens, limit, pools[0])
        b.grow(row, b.lacks(row, upto, end), pools[1])
        assert np.array_equal(a.pages, b.pages)
        assert np.array_equal(a.used, b.used)
    assert pools[0].available == pools[1].available
