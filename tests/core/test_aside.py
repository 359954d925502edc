"""Tokens that are laid aside come to the log as if each had been written at once."""

from __future__ import annotations

import numpy as np
import pytest

from modelrunner import aside
from modelrunner.aside import Aside, most_kept
from modelrunner.batch import Record, record_words

LENGTH = 100


@pytest.mark.parametrize("few_rows", [0, 128], ids=["lines", "records"])
@pytest.mark.parametrize("slots", [1, 2, 4, 17])
def test_tokens_lie_behind_those_that_are_known(monkeypatch: pytest.MonkeyPatch, few_rows: int, slots: int) -> None:
    monkeypatch.setattr(aside, "FEW_ROWS", few_rows)
    draws = np.random.default_rng(slots)
    log = draws.integers(0, 1000, (9, LENGTH)).astype(np.int32)
    rows = draws.permutation(9)[:6].astype(np.int32)
    known = draws.integers(1, 10, 6).astype(np.int32)
    laid = Aside(log, 17)
    laid.begin(rows, slots)
    while (known + 8 * slots <= LENGTH).all():
        want, steps = [log[row, :n].tolist() for row, n in zip(rows, known, strict=True)], int(draws.integers(1, 5))
        others = np.delete(log, rows, 0).copy()
        sums = np.zeros(2, np.int64)
        for step in range(steps):
            records = draws.integers(0, 1000, (6, record_words(slots + 1))).astype(np.int32)
            counts, drafted = draws.integers(1, slots + 1, 6), draws.integers(0, slots, 6)
            records[:, Record.NUM_TOKENS], records[:, Record.DRAFTED] = counts, drafted
            laid.add(records)
            sums += counts.sum(), drafted.sum()
            assert laid.steps == step + 1
            assert laid.sums(step) == (counts.sum(), drafted.sum())
            for tokens, record, count in zip(want, records, counts, strict=True):
                tokens += record[Record.TOKENS : Record.TOKENS + count].tolist()
        assert laid.sums(0) == tuple(sums)
        total, every_count, every_drafted = laid.empty(known)
        assert (every_count.sum(), every_drafted.sum()) == tuple(sums)
        assert every_count.sum(0).tolist() == total.tolist()
        assert every_count.shape == every_drafted.shape == (steps, 6)
        known += total.astype(np.int32)
        assert [log[row, :n].tolist() for row, n in zip(rows, known, strict=True)] == want
        assert np.array_equal(np.delete(log, rows, 0), others)
        assert laid.steps == 0


def test_a_row_at_the_end_of_the_log_does_not_write_into_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "FEW_ROWS", 0)
    log, rows, known = np.zeros((4, LENGTH), np.int32), np.array([3, 2, 1], np.int32), np.array([LENGTH - 6, 5, LENGTH - 7], np.int32)
    laid = Aside(log, 4)
    laid.begin(rows, 4)
    records = np.full((3, record_words(3)), 7, np.int32)
    records[:, Record.NUM_TOKENS] = 3, 4, 3
    for _ in range(2):
        laid.add(records)
    assert laid.empty(known)[0].tolist() == [6, 8, 6]
    assert (log == 7).sum(1).tolist() == [0, 6, 8, 6]
    assert (log[1, LENGTH - 7 : -1] == 7).all()
    assert (log[3, LENGTH - 6 :] == 7).all()


def test_steps_of_few_rows_are_laid_aside_for_longer() -> None:
    assert [most_kept(rows) for rows in (1, 16, 32, 64, 1000)] == [128, 128, 64, 32, 32]
