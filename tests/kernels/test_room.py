"""Memory behind rows: how much there is, and that no product sees it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from modelrunner.kernels.linear import launch
from modelrunner.kernels.linear.launch import Extras
from modelrunner.kernels.linear.plan import Stream
from modelrunner.kernels.room import MANY, end_of_tile, roomy, rows_with_room

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_few_and_many_rows_get_no_more_memory() -> None:
    assert [end_of_tile(rows) for rows in (0, 1, MANY + 1, 5000)] == [0, 1, MANY + 1, 5000]
    assert [end_of_tile(rows) for rows in (2, 9, 16, 17, 64, 65, 128, 129, 257, MANY)] == [16, 16, 16, 32, 64, 128, 128, 256, 384, MANY]


def test_a_tensor_with_room_is_contiguous_and_of_its_shape() -> None:
    tensor = roomy((72, 4, 8), torch.float16, DEVICE)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((72, 4, 8), torch.float16, True)
    assert rows_with_room(tensor.view(72, 32), 128) == 128
    assert rows_with_room(tensor.view(72, 32), 64) == 128
    assert rows_with_room(tensor.view(72, 32), 8) == 72


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
@pytest.mark.parametrize("behind", [0, 1, 30, 200])
def test_no_row_is_counted_that_ends_outside_of_the_memory(rows: int, behind: int) -> None:
    """Of slices, whose last row may end before their memory does."""
    memory = torch.zeros(rows + behind, 40)
    for first, end in ((0, 40), (8, 40), (0, 24), (8, 24)):
        matrix = memory[:rows, first:end]
        there = rows_with_room(matrix, 64)
        assert rows <= there <= rows + min(behind, -rows % 64)
        assert there == rows + min(behind, -rows % 64)
        assert matrix.as_strided((there, end - first), matrix.stride()).shape[0] == there  # raises beyond the memory
    flat = torch.zeros(40 * rows + 39)[: 40 * rows].view(rows, 40)
    assert rows_with_room(flat, 64) == rows
    assert rows_with_room(torch.zeros(1, 40).expand(rows, 40), 64) == rows


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tiles", [Stream(16, 32, 32, 1, 4, 2, 64), Stream(32, 32, 32, 2, 4, 3)], ids=str)
def test_what_lies_behind_the_rows_is_not_seen(tiles: Stream, gated: bool) -> None:
    memory = torch.full((32, 64), float("nan"), dtype=torch.float16, device=DEVICE)
    x = memory[:9]
    x.copy_(torch.randn(9, 64))
    assert rows_with_room(x, tiles.bt) == tiles.bt
    weight = (torch.randn(128, 64) / 8).to(DEVICE, torch.float16)
    extras = Extras(act=int(gated))
    out = launch.run(tiles, x, weight, extras)
    assert torch.equal(out, launch.run(tiles, x.clone(), weight, extras))
    assert not out.isnan().any()
