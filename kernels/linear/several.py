# mypy: disable-error-code="assignment, misc"
# (Triton's tuples grow; mypy takes the type of the empty one.)
"""Products of 2 to 4 rows in one launch: `gemv.py` with all rows of x on their way at once.

Each of a program's warps takes BN outputs over its share of K. A thread reads 16 bytes of one output's weights at a time, and the same
places of x, which it asks for itself: then no value goes through shared memory but the warps' sums, all of them together. The fewer threads
stand along K, the fewer steps it takes to add up what they have: C values of K are a warp's at a time, for 256 / C outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.activation.gated import gated

WARP = 256  # values that a warp reads at a time: 16 bytes a thread


@triton.jit
def _tile(ptr, row, column, K: tl.constexpr, EVEN: tl.constexpr):
    """[warps, outputs, C] values at row + column."""
    if EVEN:
        return tl.load(ptr + row + column)
    else:
        return tl.load(ptr + row + column, mask=(row * 0 + column) < K, other=0.0)


@triton.jit
def _tiles(ptr, row, column, TILES: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """A tuple of tiles, one after the other along K."""
    found = ()
    for i in tl.static_range(TILES):
        found = found + (_tile(ptr, row, column + i * (column.shape[0] * column.shape[2]), K, EVEN),)  # noqa: RUF005 - no unpacking here
    return found


@triton.jit
def _warp_sum(weights, x, TILES: tl.constexpr):
    """float32 [warps, outputs]: the sum over all tiles and a warp's threads."""
    total = weights[0].to(tl.float32) * x[0]
    for i in tl.static_range(1, TILES):
        total += weights[i].to(tl.float32) * x[i]
    return tl.sum(total, 2)


@triton.jit
def _wide(x, norms, TILES: tl.constexpr, HAS_NORM: tl.constexpr):
    """x in float32, times the norm's weight; and the sum of its squares in a warp, [warps, outputs]."""
    first = x[0].to(tl.float32)
    squares = first * first
    found = ()
    for i in tl.static_range(TILES):
        wide = x[i].to(tl.float32)
        if HAS_NORM:
            if i > 0:
                squares += wide * wide
            wide *= norms[i].to(tl.float32)
        found = found + (wide,)  # noqa: RUF005
    return found, tl.sum(squares, 2)


@triton.jit
def _halved(items, COUNT: tl.constexpr):
    """COUNT // 2 tensors [warps, outputs, 2 * width]: of those that are half the count apart."""
    W: tl.constexpr = items[0].shape[0]
    N: tl.constexpr = items[0].shape[1]
    WIDTH: tl.constexpr = items[0].numel // (W * N)
    found = ()
    for i in tl.static_range(COUNT // 2):
        found = found + (tl.reshape(tl.join(items[i], items[i + COUNT // 2]), [W, N, 2 * WIDTH]),)  # noqa: RUF005
    return found


@triton.jit
def _stack(sums, COUNT: tl.constexpr):
    """[warps, outputs, COUNT] of tensors [warps, outputs]; COUNT is 2, 4, 8 or 16."""
    items = _halved(sums, COUNT)
    if COUNT >= 4:
        items = _halved(items, COUNT // 2)
    if COUNT >= 8:
        items = _halved(items, COUNT // 4)
    if COUNT >= 16:
        items = _halved(items, COUNT // 8)
    return items[0]


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _over_warps(total, up, squares, HAS_NORM: tl.constexpr, ACT: tl.constexpr):
    """The sums of all warps, [outputs, rows] each; those that are not wanted are the first one's."""
    if ACT != 0 and HAS_NORM:
        return tl.reduce((total, up, squares), 0, _add3)
    elif ACT != 0:
        total, up = tl.reduce((total, up), 0, _add2)
        return total, up, total
    elif HAS_NORM:
        total, squares = tl.reduce((total, squares), 0, _add2)
        return total, total, squares
    else:
        total = tl.sum(total, 0)
        return total, total, total


@triton.jit
def _sums(
    weights,
    ups,
    xs,
    norms,
    T: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ACT: tl.constexpr,
):
    """Sums of the product, of what is multiplied with it, and of the squares of x: S * R tensors [warps, outputs] each."""
    totals = ()
    gates = ()
    squares = ()
    wides = ()
    for t in tl.static_range(T):
        wide, square = _wide(xs[t], norms, TILES, HAS_NORM)
        wides = wides + (wide,)  # noqa: RUF005
        squares = squares + (square,)  # noqa: RUF005
    for _ in tl.static_range(T, R):
        squares = squares + (squares[0],)  # noqa: RUF005
    for _ in tl.static_range(1, S):
        for t in tl.static_range(R):
            squares = squares + (squares[t],)  # noqa: RUF005
    for s in tl.static_range(S):
        for t in tl.static_range(T):
            totals = totals + (_warp_sum(weights[s], wides[t], TILES),)  # noqa: RUF005
            if ACT != 0:
                gates = gates + (_warp_sum(ups[s], wides[t], TILES),)  # noqa: RUF005
        for _ in tl.static_range(T, R):
            totals = totals + (squares[0] * 0.0,)  # noqa: RUF005
            if ACT != 0:
                gates = gates + (squares[0] * 0.0,)  # noqa: RUF005
    if ACT == 0:
        gates = totals
    return totals, gates, squares


@triton.jit
def several_kernel(
    x_ptr, norm_ptr, w_ptr, scale_ptr, residual_ptr, out_ptr, N, x_stride, residual_stride, eps,
    T: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `gemv_kernel`, for T rows, 2 to 4. Program n: S times BN outputs, C values of K a warp at a time."""
    if PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (K + WARPS * C - 1) // (WARPS * C)
    EVEN: tl.constexpr = K % (WARPS * C) == 0
    HAS_NORM: tl.constexpr = norm_ptr is not None
    R: tl.constexpr = 2 if T == 2 else 4
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.program_id(0) * (BN * S)
    column = tl.arange(0, WARPS)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    weights = ()
    ups = ()
    none = (tl.arange(0, BN) * 0)[None, :, None]
    for s in tl.static_range(S):
        row = (tl.minimum(first + s * BN + tl.arange(0, BN), N - 1).to(tl.int64) * K)[None, :, None]
        weights = weights + (_tiles(w_ptr, row, column, TILES, K, EVEN),)  # noqa: RUF005
        if ACT != 0:
            ups = ups + (_tiles(w_ptr + N.to(tl.int64) * K, row, column, TILES, K, EVEN),)  # noqa: RUF005
    norms = ()
    if HAS_NORM:
        norms = _tiles(norm_ptr, none, column, TILES, K, EVEN)
    if PDL:
        gdc_wait()
    xs = ()
    for t in tl.static_range(T):
        xs = xs + (_tiles(x_ptr + t * x_stride, none, column, TILES, K, EVEN),)  # noqa: RUF005
    e = tl.arange(0, S * R)[None, :]
    n = first + e // R * BN + tl.arange(0, BN)[:, None]
    t = e % R
    inside = (n < N) & (t < T)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + t.to(tl.int64) * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
    totals, gates, squares = _sums(weights, ups, xs, norms, T, R, S, TILES, HAS_NORM, ACT)
    total, up, square = _over_warps(_stack(totals, S * R), _stack(gates, S * R), _stack(squares, S * R), HAS_NORM, ACT)
    if HAS_NORM:
        rstd = tl.rsqrt(square / K + eps)
        total *= rstd
        up *= rstd
    if scale_ptr is not None:
        place = tl.minimum(n, N - 1)
        total *= tl.load(scale_ptr + place)
        if ACT != 0:
            up *= tl.load(scale_ptr + place + N)
    if ACT != 0:
        total = gated(total.to(dtype), up.to(dtype), ACT).to(tl.float32)
    if residual_ptr is not None:
        total += residual
    tl.store(out_ptr + t.to(tl.int64) * N + n, total.to(dtype), mask=inside)
