"""Products of up to some hundred rows with weights of many megabytes, which the tensor memory accelerator brings.

As in `tiles.py` the weights are the tall operand: a program multiplies BN of their rows by BT rows of x. All programs run at once, so that
the weights stream through all of them until the end; K is split where that takes more programs than there are outputs for, and one more
launch adds the parts in their order. While a program waits for its input, it fetches the first of its weights into the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear.tiles import finish, prefetch_rows, residual_of, store_parts


@triton.jit(do_not_specialize=["T"])
def stream_kernel(
    x_desc, w_desc, w_ptr, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
    K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + x @ w.T; with ACT the activation of gate (rows 0..N of w) and up (rows N..2N). Program (n, s, t): BN outputs,
    part s of K, BT rows.

    x_desc: of x [T, K] in blocks [BT, BK]; w_desc: of w_ptr in blocks [BN, BK]. part_ptr: None, or float32 [SPLIT, T, N or 2N], which gets
    plain sums instead of out. AHEAD: columns of a program's weights, a multiple of BK, that are fetched into the L2 cache while it waits.
    """
    if PDL:
        gdc_launch_dependents()
    STEPS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    first, split, row = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2) * BT
    start = split * (STEPS * BK)
    if AHEAD > 0:
        for ahead in tl.static_range(0, AHEAD, BK):  # all rows of a step before any row of the next
            prefetch_rows(w_ptr, start + ahead, N, K, BN, BK, ACT)
    n = first + tl.arange(0, BN)
    t = row + tl.arange(0, BT)
    if PDL:
        gdc_wait()
    total = tl.zeros([BN, BT], tl.float32)
    up = tl.zeros([BN, BT], tl.float32)
    for i in tl.range(STEPS):
        column = start + i * BK
        x = tl.trans(x_desc.load([row, column]))
        total = tl.dot(w_desc.load([first, column]), x, total, input_precision="ieee")
        if ACT != 0:
            up = tl.dot(w_desc.load([N + first, column]), x, up, input_precision="ieee")
    if SPLIT == 1:
        residual = residual_of(residual_ptr, n, t, T, N, residual_stride)
        finish(total, up, residual, None, out_ptr, n, t, T, N, ACT)
    else:
        store_parts(total, up, part_ptr, split, n, t, T, N, ACT)
