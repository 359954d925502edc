"""Products as in `ring.py` whose results need no second launch: thin tiles instead of parts of K, and the norm on the way.

The rows of x are the tall operand here, 64 or 128, so a tile may have as few as 32 outputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear.ring import _ask_for_input, _ask_for_weights, _first_of, _gated, _meet


@gluon.jit
def _store(total, up, residual_ptr, out_ptr, first, row, T, N, residual_stride, ACT: gl.constexpr):
    """Sums [BT, BN] of rows from `row` on and outputs from `first` on."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    t = row + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))
    n = first + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    inside = (t < T)[:, None] & (n < N)[None, :]
    if ACT != 0:
        total = _gated(total.to(dtype), up.to(dtype), ACT).to(gl.float32)
    if residual_ptr is not None:
        total += gl.load(residual_ptr + t.to(gl.int64)[:, None] * residual_stride + n[None, :], mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + t.to(gl.int64)[:, None] * N + n[None, :], total.to(dtype), mask=inside)


@gluon.jit
def _multiply(
    w_ring, w_full, w_free, x_ring, x_full, x_free, norm_ptr, norms, residual_ptr, out_ptr, T, N, residual_stride, eps, turn,
    ACT: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    PAIR: gl.constexpr = 2 if ACT != 0 else 1
    W_SLOTS: gl.constexpr = w_ring.shape[0] // PAIR
    X_SLOTS: gl.constexpr = x_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1]
    BT: gl.constexpr = x_ring.shape[1]
    BK: gl.constexpr = x_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    x_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row = _first_of(0, BT)
    first = _first_of(1, BN)
    if norm_ptr is not None:
        flat: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
        column = gl.arange(0, norms.shape[0], layout=flat)
        norms.store(gl.load(norm_ptr + column, mask=column < STEPS * BK, other=0.0))
        norms_by_step = norms._reinterpret(norms.dtype, [norms.shape[0] // BK, BK], norms.layout)
        _meet()
    if PDL:
        gdc_wait()  # the residual
    total = gl.zeros([BT, BN], gl.float32, layout)
    up = gl.zeros([BT, BN], gl.float32, layout)
    squares = gl.zeros([BT], gl.float32, gl.SliceLayout(1, x_layout))
    for i in range(STEPS):
        w_slot = i % W_SLOTS
        x_slot = i % X_SLOTS
        mbarrier.wait(x_full.index(x_slot), (i // X_SLOTS) & 1)
        if norm_ptr is not None:
            wide = x_ring.index(x_slot).load(x_layout).to(gl.float32)
            squares += gl.sum(wide * wide, 1)
            x = (wide * norms_by_step.index((i + turn) % STEPS).load(gl.SliceLayout(0, x_layout)).to(gl.float32)[None, :]).to(x_ring.dtype)
        else:
            x = x_ring.index(x_slot)
        mbarrier.wait(w_full.index(w_slot), (i // W_SLOTS) & 1)
        total = warpgroup_mma(x, w_ring.index(w_slot * PAIR).permute([1, 0]), total, is_async=True)
        if PAIR == 2:
            up = warpgroup_mma(x, w_ring.index(w_slot * PAIR + 1).permute([1, 0]), up, is_async=True)
        KEPT: gl.constexpr = 1 if norm_ptr is None else 0  # steps that go on
        if PAIR == 2:
            total, up = warpgroup_mma_wait(KEPT * 2, deps=[total, up])
        else:
            total = warpgroup_mma_wait(KEPT, deps=[total])
        _meet()  # in all warps
        mbarrier.arrive(w_free.index((i + W_SLOTS - KEPT) % W_SLOTS), pred=i >= KEPT)
        mbarrier.arrive(x_free.index((i + X_SLOTS - KEPT) % X_SLOTS), pred=i >= KEPT)
    if PAIR == 2:
        total, up = warpgroup_mma_wait(0, deps=[total, up])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    if norm_ptr is not None:
        scale = gl.rsqrt(gl.convert_layout(squares, gl.SliceLayout(1, layout)) / (STEPS * BK) + eps)[:, None]
        total *= scale
        up *= scale
    _store(total, up, residual_ptr, out_ptr, first, row, T, N, residual_stride, ACT)


@gluon.jit(do_not_specialize=["T"])
def direct_kernel(
    x_desc, w_desc, norm_ptr, residual_ptr, out_ptr, T, N, residual_stride, eps,
    ACT: gl.constexpr, STEPS: gl.constexpr, ROUND: gl.constexpr, W_SLOTS: gl.constexpr, X_SLOTS: gl.constexpr,
    TURNED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + norm(x) @ w.T; with ACT the activation of gate (rows 0..N of w) and up (rows N..2N). Program (t, n)."""
    if PDL:
        gdc_launch_dependents()
    PAIR: gl.constexpr = 2 if ACT != 0 else 1
    BT: gl.constexpr = x_desc.block_type.shape[0]
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    row = gl.program_id(0) * BT
    first = gl.program_id(1) * BN
    turn = gl.program_id(1) % STEPS if TURNED else 0
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [W_SLOTS * PAIR, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_SLOTS, BT, BK], x_desc.layout)
    norms = gl.allocate_shared_memory(x_desc.dtype, [ROUND * BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    w_full = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(W_SLOTS):
        mbarrier.init(w_full.index(slot), count=1)
        mbarrier.init(w_free.index(slot), count=1)
    for slot in gl.static_range(X_SLOTS):
        mbarrier.init(x_full.index(slot), count=1)
        mbarrier.init(x_free.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (w_ring, w_full, w_free, x_ring, x_full, x_free, norm_ptr, norms, residual_ptr, out_ptr, T, N, residual_stride, eps, turn,
                 ACT, STEPS, PDL),
            ),
            (_ask_for_weights, (w_desc, w_ring, w_full, w_free, first, N, 0, turn, PAIR, STEPS)),
            (_ask_for_input, (x_desc, x_ring, x_full, x_free, row, 0, turn, STEPS, PDL)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
