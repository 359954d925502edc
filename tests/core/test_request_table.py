"""Request table: what a patch puts where, its size, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelrunner.batch import Patch
from modelrunner.kernels.table import apply_patch
from modelrunner.request_table import RUN_OVERHEAD, Column, RequestTable

COLUMNS = (
    Column("small", torch.int32, default=7),
    Column("seed", torch.int64, default=-1),
    Column("heat", torch.float32, default=0.5),
    Column("ids", torch.int32, width=5),
    Column("big", torch.int64, width=3),
    Column("listed", torch.int32, width=3, default=-1, seats=2),
)
ROWS = 4


def table(**options: int) -> RequestTable:
    return RequestTable(COLUMNS, ROWS, torch.device("cpu"), **options)


def apply(table: RequestTable, patch: Patch) -> None:
    start = np.cumsum(patch.length, dtype=np.int32) - patch.length
    apply_patch(table.arena, *(torch.from_numpy(part) for part in (patch.dst, patch.length, start, patch.words)))


def test_a_new_table_holds_defaults_in_every_line() -> None:
    columns = table().columns
    assert columns["small"].tolist() == [7] * (ROWS + 1)
    assert columns["heat"].dtype == torch.float32
    assert columns["seed"].tolist() == [-1] * (ROWS + 1)
    assert columns["listed"].tolist() == [-1] * (ROWS + 1), "nobody has a seat"
    assert columns["listed.seats"].tolist() == [[-1] * 3] * 3, "two seats, and a line of defaults for those without one"


def test_a_row_is_set_whole() -> None:
    made = table()
    views = {name: view.data_ptr() for name, view in made.columns.items()}
    builder = made.builder()
    builder.row(1, {"small": 3, "seed": -(2**62) - 5, "heat": 1.25, "ids": [4, 5], "big": [2**40], "listed": (1, [9, 8])})
    builder.row(2, {})
    builder.elements("ids", np.array([3, 3]), np.array([1, 4]), np.array([6, 7]))
    apply(made, builder.build())
    columns = made.columns
    assert columns["small"].tolist() == [7, 3, 7, 7, 7]
    assert columns["seed"].tolist() == [-1, -(2**62) - 5, -1, -1, -1]
    assert columns["heat"].tolist() == [0.5, 1.25, 0.5, 0.5, 0.5]
    assert columns["ids"].tolist() == [[0] * 5, [4, 5, 0, 0, 0], [0] * 5, [0, 6, 0, 0, 7], [0] * 5]
    assert columns["big"].tolist() == [[0] * 3, [2**40, 0, 0], [0] * 3, [0] * 3, [0] * 3]
    assert columns["listed"].tolist() == [-1, 1, -1, -1, -1]
    assert columns["listed.seats"].tolist() == [[-1] * 3, [9, 8, -1], [-1] * 3]
    assert {name: view.data_ptr() for name, view in columns.items()} == views, "a view never moves"


def test_a_row_that_is_set_again_keeps_nothing_of_its_scalars_and_seats() -> None:
    made = table()
    for values in ({"small": 3, "seed": 5, "heat": 2.0, "listed": (0, [1, 2, 3])}, {"listed": (0, [4])}):
        builder = made.builder()
        builder.row(0, values)
        apply(made, builder.build())
    columns = made.columns
    assert (int(columns["small"][0]), int(columns["seed"][0]), float(columns["heat"][0])) == (7, -1, 0.5)
    assert columns["listed.seats"][0].tolist() == [4, -1, -1]


def test_numbers_of_any_type_are_set_alike() -> None:
    numbers = [(9, 0.1), (np.int64(9), np.float64(0.1)), (True, 1), (np.array(9, np.int32), np.array(0.1, np.float32))]
    for small, heat in numbers:
        made = table()
        builder = made.builder()
        builder.row(1, {"small": small, "heat": heat})
        apply(made, builder.build())
        assert made.columns["small"][1].item() == int(small)
        assert made.columns["heat"][1].item() == torch.tensor(float(heat)).item()


def test_a_patch_of_one_line_keeps_it_when_its_source_changes() -> None:
    """A guide's mask is filled again for the next token."""
    made, line = table(), np.array([1, 2, 3], np.int32)
    builder = made.builder()
    builder.line("listed", 0, line)
    patch = builder.build()
    line[:] = 9
    assert patch.words.tolist() == [1, 2, 3]


def test_no_edit_is_an_empty_patch() -> None:
    assert table().builder().build().empty


@pytest.mark.parametrize("values", [{}, {"ids": [1] * 5, "big": [2] * 3}, {"seed": 1, "listed": (0, [1, 2, 3])}])
def test_row_words_bounds_what_a_row_adds(values: dict[str, object]) -> None:
    builder = table().builder()
    bound = builder.row_words(values)
    builder.row(0, values)
    patch = builder.build()
    assert patch.words.size + RUN_OVERHEAD * patch.dst.size == builder.num_words <= bound


def test_a_patch_has_a_capacity() -> None:
    builder = table(max_patch_words=10).builder()
    assert builder.fits(10)
    assert not builder.fits(11)
    builder.elements("ids", np.arange(2), np.zeros(2, np.int64), np.ones(2))
    assert builder.num_words == 2 + 2 * RUN_OVERHEAD
    assert not builder.fits(1)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"smal": 1}, KeyError, r"smal.*small"),
        ({"ids": [1] * 6}, ValueError, "'ids' takes up to 5"),
        ({"small": [1, 2]}, ValueError, "'small' takes up to 1"),
        ({"listed": [1, 2]}, ValueError, r"'listed' is seated; it takes \(seat id, elements\)"),
        ({"listed": (2, [1])}, ValueError, "seats 0 to 1; got 2"),
    ],
)
def test_values_that_a_column_cannot_take(values: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        table().builder().row(0, values)


def test_columns_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="declared twice: \\['small'\\]"):
        RequestTable([COLUMNS[0], COLUMNS[0]], ROWS, torch.device("cpu"))
    with pytest.raises(ValueError, match="float64"):
        Column("x", torch.float64)
    with pytest.raises(ValueError, match="width 0"):
        Column("x", torch.int32, width=0)
    with pytest.raises(ValueError, match="64-bit elements"):
        table().builder().elements("big", np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))
