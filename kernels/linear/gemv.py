"""Products of a few rows: every program keeps its weights in registers, loaded before its input is there.

Each program computes BN outputs over the whole of K. No tensor cores: a row costs one fused multiply-add a weight, which hides behind the
weights' transfer up to about four rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.activation.gated import gated
from modelrunner.kernels.norm.rows import scaled


@triton.jit
def _input(x_ptr, norms, K: tl.constexpr, BK: tl.constexpr, eps, HAS_NORM: tl.constexpr):
    """One row of x as a tuple of [BK] tiles, normed if there are `norms` (tiles of the norm's weight)."""
    TILES: tl.constexpr = (K + BK - 1) // BK
    column = tl.arange(0, BK)
    raw = ()
    for i in tl.static_range(TILES):
        if K % BK == 0:
            raw = raw + (tl.load(x_ptr + i * BK + column),)  # noqa: RUF005 - the compiler takes no unpacking
        else:
            raw = raw + (tl.load(x_ptr + i * BK + column, mask=i * BK + column < K, other=0.0),)  # noqa: RUF005
    if HAS_NORM:
        squares = tl.zeros([BK], tl.float32)
        for i in tl.static_range(TILES):
            wide = raw[i].to(tl.float32)
            squares += wide * wide
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        normed = ()
        for i in tl.static_range(TILES):
            normed = normed + (scaled(raw[i].to(tl.float32), rstd, norms[i], raw[i].dtype),)  # noqa: RUF005
        return normed
    else:
        return raw


@triton.jit
def _weights(w_ptr, n, K: tl.constexpr, BK: tl.constexpr):
    """Rows n of the weight as a tuple of [BN, BK] tiles."""
    TILES: tl.constexpr = (K + BK - 1) // BK
    column = tl.arange(0, BK)[None, :]
    tiles = ()
    for i in tl.static_range(TILES):
        if K % BK == 0:
            tiles = tiles + (tl.load(w_ptr + n[:, None] * K + (i * BK + column)),)  # noqa: RUF005
        else:
            tile = tl.load(w_ptr + n[:, None] * K + (i * BK + column), mask=i * BK + column < K, other=0.0)
            tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def _dot(weights, x, TILES: tl.constexpr):
    """[BN]: the sum over all tiles, in float32."""
    total = weights[0].to(tl.float32) * x[0].to(tl.float32)[None, :]
    for i in tl.static_range(1, TILES):
        total += weights[i].to(tl.float32) * x[i].to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def gemv_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, residual_ptr, out_ptr, N, x_stride, residual_stride, eps,
    T: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + scale * (norm(x) @ w.T); with ACT the activation of gate (rows 0..N of w) and up (rows N..2N).

    norm_ptr, scale_ptr (of int8 weights), residual_ptr: None where there is none.
    """
    if PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (K + BK - 1) // BK
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    weights = _weights(w_ptr, row, K, BK)
    if ACT != 0:
        ups = _weights(w_ptr, row + N, K, BK)
    norms = ()
    if norm_ptr is not None:
        for i in tl.static_range(TILES):
            column = i * BK + tl.arange(0, BK)
            norms = norms + (tl.load(norm_ptr + column, mask=column < K, other=0.0),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    for t in tl.static_range(T):
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + t * residual_stride + row).to(tl.float32)
        x = _input(x_ptr + t * x_stride, norms, K, BK, eps, norm_ptr is not None)
        total = _dot(weights, x, TILES)
        if scale_ptr is not None:
            total *= tl.load(scale_ptr + row)
        if ACT != 0:
            up = _dot(ups, x, TILES)
            if scale_ptr is not None:
                up *= tl.load(scale_ptr + row + N)
            total = gated(total.to(dtype), up.to(dtype), ACT)
        if residual_ptr is not None:
            total += residual
        tl.store(out_ptr + t * N + n, total.to(dtype), mask=n < N)
