"""Products of up to some hundred rows whose warps have one task each: weights, input and multiplication go on side by side.

As in `stream.py` the weights are the tall operand, and K is split where that takes more programs than there are outputs for. One warp of a
program asks for weights, as far ahead as their ring of buffers goes, from its first moment on; another asks for tiles of x, once the kernel
before has ended; the others multiply what has arrived, and free its buffers. So weights flow while a program starts, waits for its input
or writes its results, and as a program's registers are few, the next product's stand beside it where their rings leave them room.

This is Gluon, Triton's language of explicit layouts and copies, which is experimental and cannot be interpreted. Without it, or on another
GPU than Hopper, `stream.py` computes the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear.kept import store_kept

# Names of Triton 3.6, and newer ones.
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _ask_for_weights(w_desc, ring, full, free, row, N, column, turn, PAIR: gl.constexpr, STEPS: gl.constexpr, REQUESTS: gl.constexpr):
    """One warp: tiles [BN, BK] of weights, with PAIR == 2 of gate and up, into ring [slots * PAIR, BN, BK].

    No more than REQUESTS tiles (or pairs) are on their way at a time: x and stores stand in line behind them.
    """
    SLOTS: gl.constexpr = ring.shape[0] // PAIR
    BN: gl.constexpr = ring.shape[1]
    BK: gl.constexpr = ring.shape[2]
    for i in range(STEPS):
        slot = i % SLOTS
        mbarrier.wait(free.index(slot), (i // SLOTS + 1) & 1)
        if REQUESTS < SLOTS:
            landing = i + SLOTS - REQUESTS  # counted from a turn of the ring before the first, to be positive
            mbarrier.wait(full.index(landing % SLOTS), (landing // SLOTS + 1) & 1, pred=i >= REQUESTS)
        mbarrier.expect(full.index(slot), PAIR * BN * BK * 2)
        step = (i + turn) % STEPS
        _copy(w_desc, [row, column + step * BK], full.index(slot), ring.index(slot * PAIR))
        if PAIR == 2:
            _copy(w_desc, [N + row, column + step * BK], full.index(slot), ring.index(slot * PAIR + 1))


@gluon.jit
def _ask_for_input(x_desc, ring, full, free, row, column, turn, STEPS: gl.constexpr, PDL: gl.constexpr):
    """One warp: tiles [BT, BK] of x into ring [slots, BT, BK]."""
    SLOTS: gl.constexpr = ring.shape[0]
    BT: gl.constexpr = ring.shape[1]
    BK: gl.constexpr = ring.shape[2]
    if PDL:
        gdc_wait()
    for i in range(STEPS):
        slot = i % SLOTS
        mbarrier.wait(free.index(slot), (i // SLOTS + 1) & 1)
        mbarrier.expect(full.index(slot), BT * BK * 2)
        _copy(x_desc, [row, column + (i + turn) % STEPS * BK], full.index(slot), ring.index(slot))


@gluon.jit
def _gated(gate, up, ACT: gl.constexpr):
    """`kernels.activation.gated.gated`."""
    wide = gate.to(gl.float32)
    z = wide
    if ACT == 2:
        z = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    act = (wide / (1.0 + gl.exp(-z))).to(gate.dtype)
    return (act.to(gl.float32) * up.to(gl.float32)).to(gate.dtype)


@gluon.jit
def _store(total, up, residual_ptr, out_ptr, part_ptr, part, first, row, T, N, residual_stride, ACT: gl.constexpr):
    """The program's sums [BN, BT] of outputs and rows: into part_ptr [parts, T, N or 2N], or finished into out."""
    BN: gl.constexpr = total.shape[0]
    BT: gl.constexpr = total.shape[1]
    n = first + gl.arange(0, BN, layout=gl.SliceLayout(1, total.type.layout))
    t = row + gl.arange(0, BT, layout=gl.SliceLayout(0, total.type.layout))
    inside = (t < T)[None, :] & (n < N)[:, None]
    if part_ptr is not None:
        WIDTH = N * (2 if ACT != 0 else 1)
        at = part_ptr + (part.to(gl.int64) * T + t)[None, :] * WIDTH + n[:, None]
        store_kept(at, total, inside)
        if ACT != 0:
            store_kept(at + N, up, inside)
    else:
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        if ACT != 0:
            total = _gated(total.to(dtype), up.to(dtype), ACT).to(gl.float32)
        if residual_ptr is not None:
            total += gl.load(residual_ptr + t.to(gl.int64)[None, :] * residual_stride + n[:, None], mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + t.to(gl.int64)[None, :] * N + n[:, None], total.to(dtype), mask=inside)


@gluon.jit
def _first_of(AXIS: gl.constexpr, SIZE: gl.constexpr):
    """program_id(AXIS) * SIZE, where it stands: what the compiler moves between the last products and the wait for them makes it wait for
    each of them."""
    if AXIS == 0:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.x; mul.lo.u32 $0, $0, $1;", "=&r,r", [SIZE], dtype=gl.int32, is_pure=False, pack=1
        )
    elif AXIS == 1:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.y; mul.lo.u32 $0, $0, $1;", "=&r,r", [SIZE], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.z; mul.lo.u32 $0, $0, $1;", "=&r,r", [SIZE], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _multiply(
    w_ring, w_full, w_free, x_ring, x_full, x_free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
    ACT: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The other warps: sums of the weights' tiles times x's, and their way out."""
    PAIR: gl.constexpr = 2 if ACT != 0 else 1
    W_SLOTS: gl.constexpr = w_ring.shape[0] // PAIR
    X_SLOTS: gl.constexpr = x_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1]
    BT: gl.constexpr = x_ring.shape[1]
    row = _first_of(0, BT)
    first = _first_of(1, BN)
    part = _first_of(2, 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    if PDL:
        gdc_wait()  # the residual
    total = gl.zeros([BN, BT], gl.float32, layout)
    up = gl.zeros([BN, BT], gl.float32, layout)
    for i in range(STEPS):
        w_slot = i % W_SLOTS
        x_slot = i % X_SLOTS
        mbarrier.wait(w_full.index(w_slot), (i // W_SLOTS) & 1)
        mbarrier.wait(x_full.index(x_slot), (i // X_SLOTS) & 1)
        x = x_ring.index(x_slot).permute([1, 0])
        total = warpgroup_mma(w_ring.index(w_slot * PAIR), x, total, is_async=True)
        if PAIR == 2:
            up = warpgroup_mma(w_ring.index(w_slot * PAIR + 1), x, up, is_async=True)
            total, up = warpgroup_mma_wait(2, deps=[total, up])
        else:
            total = warpgroup_mma_wait(1, deps=[total])
        _meet()  # the step before is done in all warps
        mbarrier.arrive(w_free.index((i + W_SLOTS - 1) % W_SLOTS), pred=i > 0)
        mbarrier.arrive(x_free.index((i + X_SLOTS - 1) % X_SLOTS), pred=i > 0)
    if PAIR == 2:
        total, up = warpgroup_mma_wait(0, deps=[total, up])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    _store(total, up, residual_ptr, out_ptr, part_ptr, part, first, row, T, N, residual_stride, ACT)


@gluon.jit(do_not_specialize=["T"])
def ring_kernel(
    x_desc, w_desc, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
    ACT: gl.constexpr, STEPS: gl.constexpr, W_SLOTS: gl.constexpr, X_SLOTS: gl.constexpr, REQUESTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + x @ w.T; with ACT the activation of gate (rows 0..N of w) and up (rows N..2N). Program (t, n, s): BT rows,
    BN outputs, part s of K, of STEPS times BK.

    x_desc: of x [T, K] in blocks [BT, BK]; w_desc: of w in blocks [BN, BK]. part_ptr: None, or float32 [parts, T, N or 2N], which gets
    plain sums instead of out. W_SLOTS, X_SLOTS: buffers in the rings. REQUESTS: tiles of weights on their way at a time. Each program
    begins at another step of K and comes round to it, so that not all of them read the same of x at a time.
    """
    if PDL:
        gdc_launch_dependents()
    PAIR: gl.constexpr = 2 if ACT != 0 else 1
    BT: gl.constexpr = x_desc.block_type.shape[0]
    BN: gl.constexpr = w_desc.block_type.shape[0]
    BK: gl.constexpr = w_desc.block_type.shape[1]
    row = gl.program_id(0) * BT
    first = gl.program_id(1) * BN
    column = gl.program_id(2) * (STEPS * BK)
    turn = gl.program_id(1) % STEPS
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [W_SLOTS * PAIR, BN, BK], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_SLOTS, BT, BK], x_desc.layout)
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
                (w_ring, w_full, w_free, x_ring, x_full, x_free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                 ACT, STEPS, PDL),
            ),
            (_ask_for_weights, (w_desc, w_ring, w_full, w_free, first, N, column, turn, PAIR, STEPS, REQUESTS)),
            (_ask_for_input, (x_desc, x_ring, x_full, x_free, row, column, turn, STEPS, PDL)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
