"""Which kernel multiplies how many rows, and with which tiles: a pure function of shapes and types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

GEMV_ROWS = 4  # beyond, tensor cores
TILE_ROWS = 64  # beyond, the vendor's library
PROGRAMS = 128  # that keep the GPU busy


@dataclass(frozen=True)
class Gemv:
    """Tiles of `gemv_kernel`: bn outputs a program, K in steps of bk."""

    bn: int
    bk: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of `tile_kernel`: bn outputs and bt rows a program, K in steps of bk and in `split` parts for as many programs; or, with
    `slices`, of `slice_kernel`: K in as many slices for the warps of a program.

    stages: of the pipeline that brings weights and x; 1: all weights of a program are in shared memory before its input is there.
    fused_norm: False gives the norm a launch of its own. warm: otherwise, fetch weights into the L2 cache while waiting for the input.
    """

    bt: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    fused_norm: bool = True
    warm: bool = True
    slices: int = 1


@cache
def plan(rows: int, outputs: int, inner: int, bits: int, gated: bool, norm: bool, half: bool) -> Gemv | Tiles | None:
    """None: the vendor's library, with norm and activation in launches of their own.

    outputs: of the product (of gate and up each, if gated). bits: of x's type. half: x is float16, whose range is too small for
    x * norm weight without 1 / rms.
    """
    if inner % 16 or outputs < 16:
        return None
    if rows <= GEMV_ROWS:
        return _gemv(inner, gated)
    if rows > TILE_ROWS or bits != 16:
        return None
    return _tiles(rows, outputs, inner, gated, norm and not half)


def _gemv(inner: int, gated: bool) -> Gemv | None:
    bn = 2 if gated else 4
    if inner <= 768:
        return Gemv(bn, 256, 1)
    if inner <= 4096:
        return Gemv(bn, 1024, 4)
    return Gemv(max(1, bn // 2), 2048, 8) if inner <= 16384 else None


def _tiles(rows: int, outputs: int, inner: int, gated: bool, fused_norm: bool) -> Tiles:
    bt = max(16, 1 << (rows - 1).bit_length())
    parts = 2 if gated else 1
    if outputs * inner * parts >= 2**26:  # much more than the GPU's multiprocessors hold
        return Tiles(bt, 128 // parts, 64, 1, 4, 4, fused_norm)
    if bt == 16 and 1024 <= inner <= 4096:
        return Tiles(bt, 16 if outputs >= 16 * PROGRAMS else 8, 128, 1, 8, 1, fused_norm, slices=8)
    split = 1
    while split < 8 and (inner > 512 * split or outputs // 64 * split < PROGRAMS) and inner >= 256 * split:
        split *= 2
    return Tiles(bt, 64, 64 if bt == 64 and fused_norm else 128, split, 4, 1 if inner <= 512 * split else 3, fused_norm)
