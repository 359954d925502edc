"""Products of up to some hundred rows with weights of many megabytes, which the tensor memory accelerator brings.

As in `tiles.py` the weights are the tall operand: a program multiplies BN of their rows by BT rows of x. All programs run at once, so that
the weights stream through all of them until the end; K is split where that takes more programs than there are outputs for, and one more
launch adds the parts in their order. While a program waits for its input, its pipeline fills with weights, or it fetches the first of them
into the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear.tiles import finish, prefetch_rows, residual_of, store_parts
from modelrunner.kernels.pdl import wait_in_loop


@triton.jit
def _input(x_ptr, x_row, column, there, K: tl.constexpr, EVEN: tl.constexpr):
    """A tile [BT, BK] of x. x_row: where its rows begin [BT, 1]; column: [1, BK]; there: whether there are such columns at all."""
    if EVEN:
        return tl.load(x_ptr + x_row + column, mask=there, other=0.0)
    else:
        return tl.load(x_ptr + x_row + column, mask=there & (column < K), other=0.0)


@triton.jit
def _sums_early(
    w_desc, x_ptr, x_row, first, start, N, STEPS: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_sums` with as many weights as the pipeline holds on their way before the input is there.

    The pipeline's first loads come before the loop's first turn, and so before what that waits for. x goes through registers, a turn of
    EARLY (1 or 2) steps ahead.
    """
    total = tl.zeros([BN, BT], tl.float32)
    up = tl.zeros([BN, BT], tl.float32)
    x = tl.zeros([BT, BK], x_ptr.dtype.element_ty)
    other = x
    for i in tl.range(0, STEPS, EARLY):
        column = start + i * BK
        place = column + tl.arange(0, BK)[None, :]
        if i == 0:
            if PDL:
                wait_in_loop()
            x = _input(x_ptr, x_row, place, True, K, EVEN)
            if EARLY == 2:
                other = _input(x_ptr, x_row, place + BK, STEPS > 1, K, EVEN)
        turned = tl.trans(x)
        x = _input(x_ptr, x_row, place + EARLY * BK, i + EARLY < STEPS, K, EVEN)
        total = tl.dot(w_desc.load([first, column]), turned, total, input_precision="ieee")
        if ACT != 0:
            up = tl.dot(w_desc.load([N + first, column]), turned, up, input_precision="ieee")
        if EARLY == 2:
            turned = tl.trans(other)
            other = _input(x_ptr, x_row, place + 3 * BK, i + 3 < STEPS, K, EVEN)
            total = tl.dot(w_desc.load([first, column + BK]), turned, total, input_precision="ieee")
            if ACT != 0:
                up = tl.dot(w_desc.load([N + first, column + BK]), turned, up, input_precision="ieee")
    return total, up


@triton.jit
def _sums(
    w_desc, x_desc, row, first, start, N, STEPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr
):
    """Sums [BN, BT] of the product, or of gate and up."""
    total = tl.zeros([BN, BT], tl.float32)
    up = tl.zeros([BN, BT], tl.float32)
    for i in tl.range(STEPS):
        column = start + i * BK
        x = tl.trans(x_desc.load([row, column]))
        total = tl.dot(w_desc.load([first, column]), x, total, input_precision="ieee")
        if ACT != 0:
            up = tl.dot(w_desc.load([N + first, column]), x, up, input_precision="ieee")
    return total, up


@triton.jit(do_not_specialize=["T"])
def stream_kernel(
    x_desc, w_desc, x_ptr, w_ptr, residual_ptr, out_ptr, part_ptr, T, N, x_stride, residual_stride,
    K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + x @ w.T; with ACT the activation of gate (rows 0..N of w) and up (rows N..2N). Program (n, s, t): BN outputs,
    part s of K, BT rows.

    x_desc: of x_ptr [T, K] in blocks [BT, BK], None with EARLY; w_desc: of w_ptr in blocks [BN, BK]. part_ptr: None, or float32
    [SPLIT, T, N or 2N], which gets plain sums instead of out. AHEAD: columns of a program's weights, a multiple of BK, that are fetched
    into the L2 cache while it waits. EARLY > 0: they come into shared memory instead. KEEP: parts stay in the L2 cache.
    """
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    EVEN: tl.constexpr = K % (BK * SPLIT) == 0
    first, split, row = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2) * BT
    start = split * (STEPS * BK)
    n = first + tl.arange(0, BN)
    t = row + tl.arange(0, BT)
    if EARLY > 0:
        x_row = tl.minimum(t, T - 1).to(tl.int64)[:, None] * x_stride
        total, up = _sums_early(w_desc, x_ptr, x_row, first, start, N, STEPS, K, BT, BN, BK, EVEN, ACT, EARLY, PDL)
    else:
        for ahead in tl.static_range(0, AHEAD, BK):  # all rows of a step before any row of the next
            prefetch_rows(w_ptr, start + ahead, N, K, BN, BK, ACT)
        if PDL:
            gdc_wait()
        total, up = _sums(w_desc, x_desc, row, first, start, N, STEPS, BT, BN, BK, ACT)
    if SPLIT == 1:
        residual = residual_of(residual_ptr, n, t, T, N, residual_stride)
        finish(total, up, residual, None, out_ptr, n, t, T, N, ACT)
    else:
        store_parts(total, up, part_ptr, split, n, t, T, N, ACT, KEEP)
