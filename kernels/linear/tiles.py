"""Products of up to some hundred rows on tensor cores, built to stream weights.

The weights are the tall operand: a program multiplies BN of their rows by up to BT rows of x. Where that leaves too few programs for the
GPU, K is split among programs, and `sum_kernel` adds the parts in their order. That launch costs less than its alternatives did: the last
program of a tile adding the parts (a fence and an atomic, each a way to the L2 cache and back), or all of K in one program, in slices for
its warps.

Weights start their way into shared memory or the L2 cache before the input is there. With a norm, x is multiplied by the norm's weight
alone, and the sums by 1 / rms in the end (the squares are added up on the way).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.activation.gated import gated
from modelrunner.kernels.linear.kept import store_kept


@triton.jit
def prefetch(w_ptr, first, bound, K: tl.constexpr, BN: tl.constexpr, LENGTH: tl.constexpr):
    """Fetch LENGTH values of each of BN rows of w_ptr into the L2 cache. first: row; bound: the last one there is."""
    ITEM: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = (LENGTH * ITEM + 127) // 128
    COUNT: tl.constexpr = triton.next_power_of_2(BN * LINES)
    line = tl.arange(0, COUNT)
    row = tl.minimum(first + line // LINES, bound).to(tl.int64)
    address = w_ptr.to(tl.int64) + row * (K * ITEM) + (line % LINES) * 128
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_rows(w_ptr, start, N, K: tl.constexpr, BN: tl.constexpr, LENGTH: tl.constexpr, ACT: tl.constexpr):
    """The weights of a program that begin at column `start`; with ACT those of gate and up."""
    first = tl.program_id(0) * BN
    prefetch(w_ptr + start, first, N - 1, K, BN, LENGTH)
    if ACT != 0:
        prefetch(w_ptr + start, first + N, 2 * N - 1, K, BN, LENGTH)


@triton.jit
def _chunk(ptr, row, column, K: tl.constexpr, EVEN: tl.constexpr, NOW: tl.constexpr = False):
    """NOW: the load is issued where it stands. Otherwise the compiler may move it down to where its value is needed."""
    if EVEN:
        return tl.load(ptr + row + column, volatile=NOW)
    else:
        return tl.load(ptr + row + column, mask=column < K, other=0.0, volatile=NOW)


@triton.jit
def residual_of(residual_ptr, n, t, T, N, stride):
    """float32 [BN, BT] of the residual [T, N] for outputs n and rows t; 0 if there is none."""
    if residual_ptr is not None:
        inside = (n < N)[:, None] & (t < T)[None, :]
        return tl.load(residual_ptr + t.to(tl.int64)[None, :] * stride + n[:, None], mask=inside, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def finish(total, up, residual, scale_ptr, out_ptr, n, t, T, N, ACT: tl.constexpr):
    """Scale, activation and residual of sums [BN, BT] for outputs n and rows t, and their way out."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    inside = (n < N)[:, None] & (t < T)[None, :]
    row = tl.minimum(n, N - 1)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + row)[:, None]
        if ACT != 0:
            up *= tl.load(scale_ptr + row + N)[:, None]
    if ACT != 0:
        total = gated(total.to(dtype), up.to(dtype), ACT).to(tl.float32)
    total += residual
    tl.store(out_ptr + t.to(tl.int64)[None, :] * N + n[:, None], total.to(dtype), mask=inside)


@triton.jit
def store_parts(total, up, part_ptr, split, n, t, T, N, ACT: tl.constexpr, KEEP: tl.constexpr = False):
    """Plain sums [BN, BT] of part `split` of K for outputs n and rows t, into part_ptr [SPLIT, T, N or 2N]. KEEP: by `store_kept`."""
    WIDTH = N * (2 if ACT != 0 else 1)
    inside = (n < N)[:, None] & (t < T)[None, :]
    at = part_ptr + (split.to(tl.int64) * T + t)[None, :] * WIDTH + n[:, None]
    if KEEP:
        store_kept(at, total, inside)
    else:
        tl.store(at, total, mask=inside)
    if ACT != 0:
        if KEEP:
            store_kept(at + N, up, inside)
        else:
            tl.store(at + N, up, mask=inside)


@triton.jit
def _weights(w_ptr, w_row, up_row, column, K: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr):
    """Tiles of weights at `column`: of the product, or of gate and up."""
    w = _chunk(w_ptr, w_row, column, K, EVEN)
    if ACT != 0:
        return w, _chunk(w_ptr, up_row, column, K, EVEN)
    else:
        return w, w


@triton.jit
def _hold(w_ptr, norm_ptr, w_row, up_row, x_row, first, STEPS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr):
    """All weights of a program, and the norm's weights in the shape of x: a tuple with the tiles of each step of K."""
    BK: tl.constexpr = first.shape[1]
    weights = ()
    norms = ()
    for i in tl.static_range(STEPS):
        weights = weights + (_weights(w_ptr, w_row, up_row, first + i * BK, K, EVEN, ACT),)  # noqa: RUF005 - no unpacking in kernels
        norms = norms + ((_chunk(norm_ptr, x_row * 0, first + i * BK, K, EVEN) if norm_ptr is not None else 0),)  # noqa: RUF005
    return weights, norms


@triton.jit
def _add(sums, weights, x, norm, HAS_NORM: tl.constexpr, ACT: tl.constexpr):
    """The sums (total, up, squares) with one more step of K: [BN, BK] weights times [BT, BK] of x, which `norm` scales."""
    total, up, squares = sums
    if HAS_NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        x = (wide * norm.to(tl.float32)).to(x.dtype)
    x = tl.trans(x)
    total = tl.dot(weights[0].to(x.dtype), x, total, input_precision="ieee")
    if ACT != 0:
        up = tl.dot(weights[1].to(x.dtype), x, up, input_precision="ieee")
    return total, up, squares


@triton.jit
def _add_held(
    sums, weights, norms, x_ptr, norm_ptr, x_row, first, STEPS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr
):
    """The sums with all of `_hold`. All of x is asked for before any of it is used."""
    BK: tl.constexpr = first.shape[1]
    xs = ()
    for i in tl.static_range(STEPS):
        xs = xs + (_chunk(x_ptr, x_row, first + i * BK, K, EVEN, True),)  # noqa: RUF005
    for i in tl.static_range(STEPS):
        sums = _add(sums, weights[i], xs[i], norms[i], norm_ptr is not None, ACT)
    return sums


@triton.jit
def _add_loaded(
    sums, w_ptr, x_ptr, norm_ptr, w_row, up_row, x_row, first, STEPS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr
):
    """The sums with STEPS steps of K, weights and x being brought by the compiler's pipeline."""
    BK: tl.constexpr = first.shape[1]
    for i in tl.range(STEPS):
        column = first + i * BK
        norm = _chunk(norm_ptr, x_row * 0, column, K, EVEN) if norm_ptr is not None else 0
        weights = _weights(w_ptr, w_row, up_row, column, K, EVEN, ACT)
        sums = _add(sums, weights, _chunk(x_ptr, x_row, column, K, EVEN), norm, norm_ptr is not None, ACT)
    return sums


@triton.jit(do_not_specialize=["T"])
def tile_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, residual_ptr, out_ptr, part_ptr, T, N, x_stride, residual_stride, eps,
    K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACT: tl.constexpr,
    HOLD: tl.constexpr, WARM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, for T rows. Program (n, s, t): BN outputs, part s of K, BT rows.

    part_ptr: None, or float32 [SPLIT, T, N or 2N], which gets plain sums instead of out; `sum_kernel` does the rest. HOLD: all weights of a
    program are in shared memory before the input is there.
    """
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    EVEN: tl.constexpr = K % (BK * SPLIT) == 0
    split = tl.program_id(1)
    start = split * (STEPS * BK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    w_row = (tl.minimum(n, N - 1).to(tl.int64) * K)[:, None]
    up_row = w_row + N.to(tl.int64) * K
    first = (start + tl.arange(0, BK))[None, :]
    x_row = (tl.minimum(t, T - 1).to(tl.int64) * x_stride)[:, None]
    if HOLD:
        weights, norms = _hold(w_ptr, norm_ptr, w_row, up_row, x_row, first, STEPS, K, EVEN, ACT)
    elif WARM:
        prefetch_rows(w_ptr, start, N, K, BN, STEPS * BK, ACT)
    if PDL:
        gdc_wait()
    if SPLIT == 1:
        residual = residual_of(residual_ptr, n, t, T, N, residual_stride)
    zeros = tl.zeros([BN, BT], tl.float32)
    sums = (zeros, zeros, tl.zeros([BT, BK], tl.float32))
    if HOLD:
        sums = _add_held(sums, weights, norms, x_ptr, norm_ptr, x_row, first, STEPS, K, EVEN, ACT)
    else:
        sums = _add_loaded(sums, w_ptr, x_ptr, norm_ptr, w_row, up_row, x_row, first, STEPS, K, EVEN, ACT)
    total, up, squares = sums[0], sums[1], tl.sum(sums[2], 1)
    if SPLIT == 1:
        if norm_ptr is not None:
            rstd = tl.rsqrt(squares / K + eps)[None, :]
            total *= rstd
            up *= rstd
        finish(total, up, residual, scale_ptr, out_ptr, n, t, T, N, ACT)
    else:
        store_parts(total, up, part_ptr, split, n, t, T, N, ACT)


@triton.jit
def reciprocal_rms(x_ptr, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the K values at x_ptr."""
    column = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / K + eps)


@triton.jit(do_not_specialize=["T"])
def sum_kernel(
    part_ptr, x_ptr, scale_ptr, residual_ptr, out_ptr, T, N, x_stride, residual_stride, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the parts of `tile_kernel` in their order and finishes them. Program (t, c): columns c * BLOCK onwards of row t.

    x_ptr: None, or the product's input, by whose 1 / rms the sums are multiplied.
    """
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    WIDTH = N * (2 if ACT != 0 else 1)
    if PDL:
        gdc_wait()
    rows = t + tl.arange(0, 1)
    residual = residual_of(residual_ptr, n, rows, T, N, residual_stride)
    total = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLIT):
        at = part_ptr + (s * T + t) * WIDTH + n
        total += tl.load(at, mask=inside, other=0.0)
        if ACT != 0:
            up += tl.load(at + N, mask=inside, other=0.0)
    if x_ptr is not None:
        rstd = reciprocal_rms(x_ptr + t * x_stride, eps, K, BLOCK_K)
        total *= rstd
        up *= rstd
    finish(total[:, None], up[:, None], residual, scale_ptr, out_ptr, n, rows, T, N, ACT)
