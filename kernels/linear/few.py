"""Products of 2 to 16 rows in one launch: every program keeps its weights in registers as the tensor cores take them.

As in `gemv.py` a program computes BN outputs over the whole of K, and its weights are on their way before its input is there. But a row
costs no multiply-add a weight: 16 outputs and 8 rows are one instruction. The program's warps share K, and their sums meet in shared memory
once. A thread reads 16 bytes of a row of weights and of x at a time; which places of an instruction's K these are is alike in both, so no
value moves between threads.

In Gluon, since Triton's own layouts bring every operand through shared memory. It cannot be interpreted: `gemv_kernel` computes the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.activation.gated import gated

CHUNK = 8  # values of 16 bits that a thread reads at a time
ACROSS = 64  # values of K that a warp takes at a time: two chunks of four threads


@gluon.jit
def _tiles(ptr, row, column, TILES: gl.constexpr, STRIDE: gl.constexpr):
    """A tuple of tiles whose columns begin STRIDE apart."""
    found = ()
    for i in gl.static_range(TILES):
        found = found + (gl.load(ptr + row + (column + i * STRIDE)),)  # noqa: RUF005 - the compiler takes no unpacking
    return found


@gluon.jit
def _inputs(x_ptr, row, column, there, TILES: gl.constexpr, STRIDE: gl.constexpr):
    """The same of x, 0 in rows that are not there."""
    found = ()
    for i in gl.static_range(TILES):
        found = found + (gl.load(x_ptr + row + (column + i * STRIDE), mask=there, other=0.0),)  # noqa: RUF005
    return found


@gluon.jit
def _products(weights, x, zeros, TILES: gl.constexpr):
    """float32 [BN, BT]: the sum over all tiles and warps. Several sums at a time, since an instruction waits for the one before on its sum."""
    CHAINS: gl.constexpr = 4 if TILES >= 4 else TILES
    sums = ()
    for c in gl.static_range(CHAINS):
        total = zeros
        for i in gl.static_range(c, TILES, CHAINS):
            total = mma_v2(weights[i], x[i], total)
        sums = sums + (total,)  # noqa: RUF005
    total = sums[0]
    for c in gl.static_range(1, CHAINS):
        total += sums[c]
    return gl.sum(total, 0)


@gluon.jit
def _normed(weights, norms, TILES: gl.constexpr):
    """The weights times those of the norm."""
    found = ()
    for i in gl.static_range(TILES):
        found = found + ((weights[i].to(gl.float32) * norms[i].to(gl.float32)).to(weights[i].dtype),)  # noqa: RUF005
    return found


@gluon.jit(do_not_specialize=["T"])
def few_kernel(
    x_ptr, norm_ptr, w_ptr, residual_ptr, out_ptr, T, N, x_stride, residual_stride, eps,
    K: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, for T <= BT rows of 16 bits. BT: 8 or 16. A warp takes STEP values of K at a time; WARPS * STEP divides K."""
    if PDL:
        gdc_launch_dependents()
    TILES: gl.constexpr = K // (WARPS * STEP)
    STRIDE: gl.constexpr = WARPS * STEP
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 8)  # [warp, output, k]
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 8)  # [warp, k, row]
    flat: gl.constexpr = gl.SliceLayout(0, sums)  # [output, row]
    dtype: gl.constexpr = out_ptr.dtype.element_ty

    first = gl.program_id(0) * BN
    w_row = gl.minimum(first + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, left))), N - 1).to(gl.int64)[None, :, None] * K
    w_column = (
        gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None] * STEP
        + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    )
    weights = _tiles(w_ptr, w_row, w_column, TILES, STRIDE)
    if ACT != 0:
        ups = _tiles(w_ptr + N.to(gl.int64) * K, w_row, w_column, TILES, STRIDE)
    x_column = (
        gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None] * STEP
        + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    )
    row = gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    if norm_ptr is not None:
        norms = _tiles(norm_ptr, 0, w_column, TILES, STRIDE)
        weights = _normed(weights, norms, TILES)
        if ACT != 0:
            ups = _normed(ups, norms, TILES)
    if PDL:
        gdc_wait()
    x = _inputs(x_ptr, gl.minimum(row, T - 1).to(gl.int64) * x_stride, x_column, row < T, TILES, STRIDE)
    n = first + gl.arange(0, BN, gl.SliceLayout(1, flat))[:, None]
    t = gl.arange(0, BT, gl.SliceLayout(0, flat))[None, :]
    inside = (n < N) & (t < T)
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + t.to(gl.int64) * residual_stride + n, mask=inside, other=0.0).to(gl.float32)
    if norm_ptr is not None:
        squares = gl.zeros([WARPS, STEP, BT], gl.float32, right)
        for i in gl.static_range(TILES):
            wide = x[i].to(gl.float32)
            squares += wide * wide
    zeros = gl.zeros([WARPS, BN, BT], gl.float32, sums)
    total = _products(weights, x, zeros, TILES)
    if ACT != 0:
        up = _products(ups, x, zeros, TILES)
    if norm_ptr is not None:
        square = gl.convert_layout(gl.sum(gl.sum(squares, 1), 0), gl.SliceLayout(0, flat))
        rstd = gl.rsqrt(square / K + eps)[None, :]
        total *= rstd
        if ACT != 0:
            up *= rstd
    if ACT != 0:
        total = gated(total.to(dtype), up.to(dtype), ACT).to(gl.float32)
    if residual_ptr is not None:
        total += residual
    gl.store(out_ptr + t.to(gl.int64) * N + n, total.to(dtype), mask=inside)
