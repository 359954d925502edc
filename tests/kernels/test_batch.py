"""Gathering a batch from the request table, against loops over rows and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelrunner.kernels.batch import gather_block_table, gather_rows, gather_tokens, slot_mapping


def int32(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("n", [1, 63, 500])
def test_gather_rows(n: int, drafts: bool, rng: np.random.Generator) -> None:
    table_rows = n + 1
    known = rng.integers(1, 100, table_rows)
    computed = (known - rng.integers(0, 40, table_rows)).clip(0)
    finished, generation = rng.integers(0, 2, table_rows), rng.integers(0, 3, table_rows)
    rows = rng.permutation(table_rows)[:n]
    num_query, planned = rng.integers(0, 30, n), rng.integers(0, 3, n)
    out = [torch.full((n,), -9, dtype=torch.int32) for _ in range(3)]
    samples = torch.ones(n, dtype=torch.bool)
    num_drafts = rng.integers(0, 4, table_rows) if drafts else np.zeros(table_rows, np.int64)
    inputs = (rows, num_query, planned, computed, known, finished, generation)
    gather_rows(*map(int32, inputs), *out, samples, int32(num_drafts) if drafts else None)
    for i, row in enumerate(rows):
        alive = num_query[i] > 0 and not finished[row] and generation[row] == planned[i]
        query = min(num_query[i], known[row] - computed[row] + num_drafts[row]) if alive else 0
        end = computed[row] + query
        want = (query, computed[row], end, end >= known[row]) if query > 0 else (0, 0, 0, False)
        assert (*(int(o[i]) for o in out), bool(samples[i])) == want


@pytest.mark.parametrize("padding", [0, 1, 17])
@pytest.mark.parametrize("n", [1, 63, 120])
def test_gather_tokens(n: int, padding: int, rng: np.random.Generator) -> None:
    """Rows with unused query slots, dead rows, rows without slots, and tokens past the last row."""
    token_ids = rng.integers(0, 1000, (n + 1, 64))
    slots = rng.integers(0, 9, n)
    slots[0] = 5
    query_len = (slots - rng.integers(0, 4, n)).clip(0)
    computed, rows = rng.integers(0, 50, n), rng.permutation(n + 1)[:n]
    start = np.concatenate(([0], np.cumsum(slots)))
    total = int(start[-1]) + padding
    ids, positions, owner = (torch.full((total,), -9, dtype=torch.int64) for _ in range(3))
    valid, last = torch.ones(total, dtype=torch.bool), torch.full((n,), -9, dtype=torch.int64)
    drafts = np.minimum(rng.integers(0, 3, n), (query_len - 1).clip(0))
    known = np.zeros(n + 1, np.int64)
    known[rows] = computed + query_len - drafts
    inputs = (rows, start, query_len, computed, known, token_ids)
    gather_tokens(*map(int32, inputs), ids, positions, owner, valid, last)
    want = {}
    for i in range(n):
        for j in range(query_len[i]):
            want[int(start[i]) + j] = (int(token_ids[rows[i], computed[i] + j]), int(computed[i] + j), i)
        if query_len[i]:
            assert last[i] == start[i] + query_len[i] - drafts[i] - 1
    assert len(want) == query_len.sum() > 0
    for t in range(total):
        assert bool(valid[t]) == (t in want)
        assert (int(ids[t]), int(positions[t])) == want.get(t, (0, 0, 0))[:2]
        if t in want:
            assert int(owner[t]) == want[t][2]
    assert ((owner >= 0) & (owner < n)).all()
    assert ((last >= 0) & (last < total)).all()


def test_gather_block_table(rng: np.random.Generator) -> None:
    table, rows = int32(rng.integers(0, 99, (8, 12))), int32([3, 7, 0, 7])
    out = torch.full((4, 5), -9, dtype=torch.int32)
    gather_block_table(table, rows, out)
    assert out.tolist() == [table[row, :5].tolist() for row in (3, 7, 0, 7)]


@pytest.mark.parametrize("tokens_per_page", [1, 7, 16])
def test_slot_mapping(tokens_per_page: int, rng: np.random.Generator) -> None:
    n, total = 9, 500
    block_table = rng.integers(0, 200, (n, -(-300 // tokens_per_page)))
    block_table[4] = 0  # a row whose pages are all the null page
    owner, positions, valid = rng.integers(0, n, total), rng.integers(0, 300, total), rng.random(total) < 0.8
    out = torch.full((total,), -9, dtype=torch.int64)
    slot_mapping(int32(block_table), torch.from_numpy(owner), torch.from_numpy(positions), torch.from_numpy(valid), tokens_per_page, out)
    for t in range(total):
        page = int(block_table[owner[t], positions[t] // tokens_per_page])
        assert int(out[t]) == (page * tokens_per_page + positions[t] % tokens_per_page if valid[t] and page else -1)


def test_slots_past_two_to_the_31() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    slot_mapping(int32([[2**31 - 1]]), one, one + 3, torch.tensor([True]), 16, out)
    assert out.item() == (2**31 - 1) * 16 + 3
