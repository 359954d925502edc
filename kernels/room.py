"""Memory behind a tensor's last row, for tiles that reach beyond it.

The tensor memory accelerator fills in what of a tile lies outside of its tensor, and is slower at that than at reading: on an H200 a
product of 72 rows in tiles of 128 took a third longer than one of 128. So tensors that such tiles are read of get memory up to a tile's
end, and what lies there is multiplied along, and written nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FEW, TILE, MANY = 1, 128, 512  # rows: so many and fewer, or more than MANY, get no more memory; tiles have up to TILE


def end_of_tile(rows: int) -> int:
    """Rows up to a tile's end: a power of two, or from TILE on a multiple of it."""
    if not FEW < rows <= MANY:
        return rows
    return min(end for end in (16, 32, 64, TILE) if rows <= end) if rows <= TILE else -(-rows // TILE) * TILE


def roomy(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty` of a tensor behind whose rows there is memory up to a tile's end."""
    rows = shape[0]
    return torch.empty((end_of_tile(rows), *shape[1:]), dtype=dtype, device=device)[:rows]


def rows_with_room(matrix: torch.Tensor, tile: int) -> int:
    """Rows of matrix [T, K], and of those behind them that its memory holds up to the end of the last tile."""
    rows, columns = matrix.shape
    missing = -rows % tile
    if not missing or not rows:
        return rows
    behind = (
        matrix.untyped_storage().nbytes() // matrix.element_size() - matrix.storage_offset() - columns
    )  # values, of the first row's end
    return min(rows + missing, 1 + behind // matrix.stride(0)) if matrix.stride(0) else rows
