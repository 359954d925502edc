"""Matrix products whose every row is computed alike, however many rows there are (the mode `device.deterministic`).

One shape of tile for a weight, and K in parts that follow from the weight alone: each part is summed from nothing, and the parts are added
in their order. Few rows have a program for each part, and a second launch adds them; many have one program that walks all parts. Both do
the same additions, so a row's result does not tell which it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl

SHARED_ROWS = 256  # up to so many rows, each part of K is a program's
PROGRAMS = 128  # that keep the GPU busy
SUM_BLOCK = 256


@dataclass(frozen=True)
class FixedTiles:
    """bt rows and bn outputs a program, K in steps of bk and in `parts`."""

    bt: int
    bn: int
    bk: int
    parts: int
    warps: int
    stages: int


@cache
def fixed_tiles(outputs: int, inner: int, bits: int) -> FixedTiles:
    """The tiles of every product with a weight [outputs, inner]. bits: of the activations' type."""
    bn, bk = (64, 64) if bits == 16 else (32, 32)
    parts = 1
    while parts < 8 and -(-outputs // bn) * parts < PROGRAMS and inner >= 4 * parts * bk:
        parts *= 2
    return FixedTiles(64 if bits == 16 else 32, bn, bk, parts, 4, 4 if bits == 16 else 2)


@triton.jit
def _load(ptr, row, column, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + row + column)
    else:
        return tl.load(ptr + row + column, mask=column < K, other=0.0)


@triton.jit(do_not_specialize=["T"])
def fixed_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, part_ptr, T, N, x_stride,
    K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, s, t): BN outputs of BT rows. part_ptr: None, or float32 [PARTS, T, N], which gets the sum of part s instead of out."""
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK * PARTS - 1) // (BK * PARTS)
    EVEN: tl.constexpr = K % (BK * PARTS) == 0
    HERE: tl.constexpr = PARTS if part_ptr is None else 1
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    w_row = (tl.minimum(n, N - 1).to(tl.int64) * K)[:, None]
    x_row = (tl.minimum(t, T - 1).to(tl.int64) * x_stride)[:, None]
    inside = (n < N)[:, None] & (t < T)[None, :]
    if PDL:
        gdc_wait()
    total = tl.zeros([BN, BT], tl.float32)
    for part in range(HERE):
        first = (tl.program_id(1) + part) * (STEPS * BK)
        sums = tl.zeros([BN, BT], tl.float32)
        for i in tl.range(STEPS):
            column = (first + i * BK + tl.arange(0, BK))[None, :]
            x = _load(x_ptr, x_row, column, K, EVEN)
            w = _load(w_ptr, w_row, column, K, EVEN).to(x.dtype)
            sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
        total += sums
    if part_ptr is None:
        if scale_ptr is not None:
            total *= tl.load(scale_ptr + tl.minimum(n, N - 1))[:, None]
        tl.store(out_ptr + t.to(tl.int64)[None, :] * N + n[:, None], total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row = tl.program_id(1).to(tl.int64) * T + t
        tl.store(part_ptr + row[None, :] * N + n[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["T"])
def fixed_sum_kernel(part_ptr, scale_ptr, out_ptr, T, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Adds the parts of `fixed_kernel` in their order. Program (t, c): columns c * BLOCK onwards of row t."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + (part * T + t) * N + n, mask=n < N, other=0.0)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + t * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def fixed_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`reference.matmul`, each row of x by the same operations whatever the other rows are."""
    return _product(x, weight, None)


def fixed_int8_matmul(x: torch.Tensor, qweight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`reference.int8_matmul`, as `fixed_matmul`."""
    return _product(x, qweight, scale)


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    weight = weight.contiguous()
    (rows, inner), outputs = flat.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows and outputs:
        _launch(fixed_tiles(outputs, inner, 8 * x.element_size()), flat, weight, scale, out)
    return out.view(*x.shape[:-1], outputs)


def _launch(tiles: FixedTiles, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    (rows, outputs), shared, dependent = out.shape, tiles.parts > 1 and out.shape[0] <= SHARED_ROWS, pdl(x)
    part = torch.empty((tiles.parts, rows, outputs), dtype=torch.float32, device=x.device) if shared else None
    grid = (triton.cdiv(outputs, tiles.bn), tiles.parts if shared else 1, triton.cdiv(rows, tiles.bt))
    fixed_kernel[grid](
        x, weight, scale, out, part, rows, outputs, x.stride(0),
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, PARTS=tiles.parts, num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip
    if part is not None:
        grid = (rows, triton.cdiv(outputs, SUM_BLOCK), 1)
        fixed_sum_kernel[grid](part, scale, out, rows, outputs, PARTS=tiles.parts, BLOCK=SUM_BLOCK, num_warps=2, **dependent)
