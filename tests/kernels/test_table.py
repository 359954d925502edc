"""Request-table operations against loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelrunner.batch import Finish, Record, record_words
from modelrunner.kernels.table import apply_patch, update_state, write_record
from modelrunner.kernels.table import reference as table_reference

Columns = dict[str, torch.Tensor]
MAX_ROWS, LENGTH, SEATS, WIDTH = 9, 40, 3, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_constants_match_the_contract() -> None:
    """Kernels cannot import the core, so they repeat its codes."""
    codes = [table_reference.FINISH_NONE, table_reference.FINISH_STOP, table_reference.FINISH_LENGTH, table_reference.FINISH_ERROR]
    assert codes == [Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.ERROR]
    assert table_reference.RECORD_HEADER == Record.TOKENS


@pytest.mark.parametrize("runs", [1, 63, 500])
def test_apply_patch(runs: int, rng: np.random.Generator) -> None:
    length = rng.integers(0, 7, runs).astype(np.int32)
    words = rng.integers(-(2**31), 2**31, int(length.sum())).astype(np.int32)
    places = rng.permutation(runs) * 7  # disjoint
    arena = torch.arange(7 * runs, dtype=torch.int32)
    want = arena.numpy().copy()
    start = 0
    for dst, n in zip(places, length, strict=True):
        want[dst : dst + n] = words[start : start + n]
        start += n
    first = np.cumsum(length, dtype=np.int32) - length
    apply_patch(arena, *(torch.from_numpy(part) for part in (places, length, first, words)))
    assert np.array_equal(arena.numpy(), want)


def test_an_empty_patch_changes_nothing() -> None:
    arena = torch.arange(5, dtype=torch.int32)
    apply_patch(arena, torch.empty(0, dtype=torch.int64), int32(), int32(), int32())
    assert arena.tolist() == [0, 1, 2, 3, 4]


def make_columns(rng: np.random.Generator) -> Columns:
    """Live-looking rows; known is at least 1, as every request has a prompt."""
    rows = MAX_ROWS + 1
    known = rng.integers(1, 20, rows)
    stop_ids = np.full((SEATS + 1, WIDTH), -1)
    stop_ids[:SEATS, : WIDTH - 1] = rng.integers(0, 12, (SEATS, WIDTH - 1))
    columns = {
        "token_ids": rng.integers(0, 12, (rows, LENGTH)),
        "computed": known - rng.integers(1, 3, rows).clip(max=known),
        "known": known,
        "finished": np.zeros(rows, int),
        "limit": known + rng.integers(1, 5, rows),
        "num_accepted": rng.integers(0, 3, rows),
        "stop_seat": rng.integers(-1, SEATS, rows),
        "stop_ids": stop_ids,
    }
    return {name: torch.from_numpy(value.astype(np.int32)) for name, value in columns.items()}


def slow_update(c: Columns, row: int, query_len: int, samples: bool, tokens: list[int], num: int, ok: bool) -> tuple[int, int]:
    """One row, one token at a time: (tokens that count, finish code)."""
    if query_len == 0:
        return 0, Finish.NONE
    before = int(c["computed"][row])
    if not samples or not ok:
        c["computed"][row] += query_len
        c["num_accepted"][row] = query_len
        if samples:
            c["finished"][row] = Finish.ERROR
        return 0, Finish.ERROR if samples else Finish.NONE
    finish, counted, seat = Finish.NONE, 0, int(c["stop_seat"][row])
    for token in tokens[:num]:
        c["token_ids"][row, int(c["known"][row])] = token
        c["known"][row] += 1
        counted += 1
        if seat >= 0 and token in c["stop_ids"][seat].tolist():
            finish = Finish.STOP
        elif c["known"][row] == c["limit"][row]:
            finish = Finish.LENGTH
        if finish:
            break
    c["computed"][row] = c["known"][row] - 1
    c["num_accepted"][row] = c["computed"][row] - before
    c["finished"][row] = finish
    return counted, finish


@pytest.mark.parametrize("draft", [0, 3])
@pytest.mark.parametrize("seed", range(40))
def test_update_state(seed: int, draft: int) -> None:
    """Random rows: live, dead, chunks that do not sample, failed logits, and several padded rows that share the scratch row."""
    rng = np.random.default_rng(seed)
    columns = make_columns(rng)
    want = {name: value.clone() for name, value in columns.items()}
    rows = np.concatenate((rng.permutation(MAX_ROWS)[:6], [MAX_ROWS] * 3))
    alive = np.array([*(rng.random(6) < 0.7), False, False, False])
    samples = alive & (rng.random(9) < 0.7)
    missing = (columns["known"] - columns["computed"]).numpy()[rows]
    query_len = np.where(samples, missing + draft, 1) * alive  # a sampling row computes all it knows, and its drafts
    tokens, num, ok = rng.integers(0, 12, (9, 1 + draft)), rng.integers(1, 2 + draft, 9), rng.random(9) < 0.8
    num_tokens = torch.from_numpy(num.astype(np.int32))
    finish = update_state(
        torch.from_numpy(rows.astype(np.int32)),
        torch.from_numpy(query_len.astype(np.int32)),
        torch.from_numpy(samples),
        torch.from_numpy(tokens),
        num_tokens,
        torch.from_numpy(ok),
        *columns.values(),
    )
    counted = [
        slow_update(want, *row) for row in zip(rows.tolist(), query_len.tolist(), samples, tokens.tolist(), num.tolist(), ok, strict=True)
    ]
    assert num_tokens.tolist() == [n for n, _ in counted]
    assert finish.tolist() == [code for _, code in counted]
    assert finish.dtype == torch.int32
    for name, value in columns.items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize(
    ("token", "limit", "finish"), [(5, 9, Finish.STOP), (6, 4, Finish.LENGTH), (5, 4, Finish.STOP), (6, 5, Finish.NONE)]
)
def test_a_stop_id_wins_over_the_length_limit(token: int, limit: int, finish: Finish) -> None:
    token_ids = torch.zeros(2, 8, dtype=torch.int32)
    computed, known, finished = int32(2, 0), int32(3, 0), int32(0, 0)
    code = update_state(
        int32(0),
        int32(1),
        torch.tensor([True]),
        torch.tensor([[token]]),
        int32(1),
        torch.tensor([True]),
        token_ids,
        computed,
        known,
        finished,
        int32(limit, 0),
        int32(0, 0),
        int32(0, -1),
        torch.tensor([[5, -1], [-1, -1]], dtype=torch.int32),
    )
    assert (code.tolist(), finished.tolist(), known.tolist(), computed.tolist()) == ([finish], [finish, 0], [4, 0], [3, 0])
    assert token_ids[0].tolist() == [0, 0, 0, token, 0, 0, 0, 0]


def test_records_go_round_the_ring() -> None:
    """Each step fills its own entry and leaves the others alone."""
    entries, rows, draft = 3, 5, 1
    ring = torch.full((entries, 8, record_words(draft)), -7, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int64)
    want = ring.clone()
    for step in range(7):
        row, generation = torch.arange(rows, dtype=torch.int32) + step, torch.arange(rows, dtype=torch.int32) * 10
        num, finish = int32(0, 1, 2, 1, 0), int32(0, 0, 1, 2, 3)
        tokens = torch.arange(rows * 2).view(rows, 2) + 100 * step
        drafted = int32(1, 1, 0, 1, 0) if step % 2 else None
        write_record(ring, counter, row, generation, num, finish, tokens, drafted)
        for i in range(rows):
            kept = [int(tokens[i, j]) if j < num[i] else -1 for j in range(2)]
            want[step % entries, i] = int32(
                int(row[i]), int(generation[i]), int(num[i]), int(finish[i]), 0 if drafted is None else int(drafted[i]), *kept
            )
        assert torch.equal(ring, want)
        assert counter.item() == step + 1
