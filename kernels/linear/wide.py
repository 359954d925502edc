"""Products of some hundred rows by rings whose tiles of weights are so tall that several groups of warps multiply them.

As in `ring.py` one warp of a program asks for weights and another for x. What arrives of both goes into one slot of one ring, and each
group of four warps multiplies 64 rows of its weights by all rows of its x: no group waits for another, and a slot is free once all of them
are done with it. The taller a program's tile of weights, the less often x is read again, which else takes as much of the L2 cache's
bandwidth as the weights.

Rows of gate and up of the same outputs alternate within a tile, eight of each at a time: so both sums of an output are in one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.linear.ring import _copy, _first_of, _gated, _meet

TALL = gl.constexpr(64)  # rows of weights that a group multiplies
PIECE = gl.constexpr(16)  # rows of x whose sums it stores at a time


@gluon.jit
def _ask_for_weights(w_desc, ring, full, free, first, column, turn, GROUPS: gl.constexpr, STEPS: gl.constexpr, ACT: gl.constexpr):
    """One warp: GROUPS tiles of weights a step into ring [slots * GROUPS, TALL, BK]."""
    SLOTS: gl.constexpr = ring.shape[0] // GROUPS
    BK: gl.constexpr = ring.shape[ring.rank - 1]
    for i in range(STEPS):
        slot = i % SLOTS
        mbarrier.wait(free.index(slot), (i // SLOTS + 1) & 1)
        mbarrier.expect(full.index(slot), GROUPS * TALL * BK * 2)
        place = column + (i + turn) % STEPS * BK
        for g in gl.static_range(GROUPS):
            tile = ring.index(slot * GROUPS + g)
            if ACT != 0:
                at = [first // 8 + g * (TALL // 16), 0, 0, place]
                _copy(w_desc, at, full.index(slot), tile.reshape([TALL // 16, 2, 8, BK]))
            else:
                _copy(w_desc, [first + g * TALL, place], full.index(slot), tile)


@gluon.jit
def _ask_for_input(x_desc, ring, full, free, row, column, turn, TILES: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr):
    """One warp: TILES tiles [BT, BK] of x a step into ring [slots * TILES, BT, BK]."""
    SLOTS: gl.constexpr = ring.shape[0] // TILES
    BT: gl.constexpr = ring.shape[1]
    BK: gl.constexpr = ring.shape[2]
    if PDL:
        gdc_wait()
    for i in range(STEPS):
        slot = i % SLOTS
        mbarrier.wait(free.index(slot), (i // SLOTS + 1) & 1)
        mbarrier.expect(full.index(slot), TILES * BT * BK * 2)
        place = column + (i + turn) % STEPS * BK
        for tile in gl.static_range(TILES):
            _copy(x_desc, [row + tile * BT, place], full.index(slot), ring.index(slot * TILES + tile))


@gluon.jit
def _halves(total):
    """Of [N, T], [N, :T / 2] and [N, T / 2:]."""
    return total.reshape([total.shape[0], 2, total.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store(total, residual_ptr, out_ptr, part_ptr, part, first, row, T, N, residual_stride, ACT: gl.constexpr):
    """Sums [TALL, rows] of a group: into part_ptr [parts, T, N], or finished into out. In pieces, as not all addresses find a register."""
    ROWS: gl.constexpr = total.shape[1]
    if ROWS > PIECE:
        left, right = _halves(total)
        _store(left, residual_ptr, out_ptr, part_ptr, part, first, row, T, N, residual_stride, ACT)
        _store(right, residual_ptr, out_ptr, part_ptr, part, first, row + ROWS // 2, T, N, residual_stride, ACT)
    else:
        if ACT != 0:
            dtype: gl.constexpr = out_ptr.dtype.element_ty
            gate, up = total.reshape([TALL // 16, 2, 8, ROWS]).permute([0, 2, 3, 1]).split()
            total = _gated(gate.to(dtype), up.to(dtype), ACT).to(gl.float32).reshape([TALL // 2, ROWS])
        n = first + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))
        t = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, total.type.layout))
        inside = (t < T)[None, :] & (n < N)[:, None]
        if part_ptr is not None:
            gl.store(part_ptr + (part.to(gl.int64) * T + t)[None, :] * N + n[:, None], total, mask=inside)
        else:
            if residual_ptr is not None:
                at = residual_ptr + t.to(gl.int64)[None, :] * residual_stride + n[:, None]
                total += gl.load(at, mask=inside, other=0.0).to(gl.float32)
            gl.store(out_ptr + t.to(gl.int64)[None, :] * N + n[:, None], total.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _number(GROUP: gl.constexpr):
    """GROUP, by an instruction that no other group has, lest the compiler give the groups one end, wait for the last products included: it
    would make them wait for each of them."""
    if GROUP == 0:
        return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif GROUP == 1:
        return gl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise("mov.u32 $0, 2;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply(
    w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Four warps: sums of the weights' tiles of their group times x's, and their way out."""
    SLOTS: gl.constexpr = x_ring.shape[0] // TILES
    BT: gl.constexpr = x_ring.shape[1]
    OUTPUTS: gl.constexpr = TALL // 2 if ACT != 0 else TALL
    row = _first_of(0, TILES * BT)
    first = _first_of(1, GROUPS * OUTPUTS)
    part = _first_of(2, 1)
    if PDL:
        gdc_wait()  # the residual
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    total = gl.zeros([TALL, BT], gl.float32, layout)
    other = gl.zeros([TALL, BT], gl.float32, layout)
    for i in range(STEPS):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        w = w_ring.index(slot * GROUPS + GROUP)
        total = warpgroup_mma(w, x_ring.index(slot * TILES).permute([1, 0]), total, is_async=True)
        if TILES == 2:
            other = warpgroup_mma(w, x_ring.index(slot * TILES + 1).permute([1, 0]), other, is_async=True)
            total, other = warpgroup_mma_wait(2, deps=[total, other])
        else:
            total = warpgroup_mma_wait(1, deps=[total])
        _meet()  # the step before is done in all warps
        mbarrier.arrive(free.index((i + SLOTS - 1) % SLOTS), pred=i > 0)
    if TILES == 2:
        total, other = warpgroup_mma_wait(0, deps=[total, other])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    first += _number(GROUP) * OUTPUTS
    if TILES == 2:
        _store(other, residual_ptr, out_ptr, part_ptr, part, first, row + BT, T, N, residual_stride, ACT)
    _store(total, residual_ptr, out_ptr, part_ptr, part, first, row, T, N, residual_stride, ACT)


@gluon.jit(do_not_specialize=["T"])
def wide_kernel(
    x_desc, w_desc, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
    GROUPS: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, OTHERS: gl.constexpr, ACT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + x @ w.T; with ACT the activation of gate (rows 0..N of w) and up (rows N..2N). Program (t, n, s): BT rows,
    GROUPS * 64 rows of w, part s of K, of STEPS times BK. Four warps.

    x_desc: of x [T, K] in blocks [BT, BK]; w_desc: of w in blocks [64, BK], or with ACT, of w as [N / 8, 2, 8, K] in blocks [4, 2, 8, BK].
    part_ptr: None, or without ACT float32 [parts, T, N], which gets plain sums instead of out. GROUPS: 1 to 3. SLOTS: of the ring.
    OTHERS: registers of a thread of the groups but the first. Each program begins at another step of K and comes round to it.
    """
    if PDL:
        gdc_launch_dependents()
    BT: gl.constexpr = x_desc.block_type.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    row = gl.program_id(0) * (TILES * BT)
    first = gl.program_id(1) * (GROUPS * (TALL // 2 if ACT != 0 else TALL))
    column = gl.program_id(2) * (STEPS * BK)
    turn = gl.program_id(1) % STEPS
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS * GROUPS, TALL, BK], x_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS * TILES, BT, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(free.index(slot), count=GROUPS)
    # Constants go into a tuple where it is written: a name for it would make plain numbers of them.
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TWO: gl.constexpr = 2
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             ZERO, GROUPS, TILES, STEPS, ACT, PDL)),
                (_ask_for_weights, (w_desc, w_ring, full, free, first, column, turn, GROUPS, STEPS, ACT)),
                (_ask_for_input, (x_desc, x_ring, full, free, row, column, turn, TILES, STEPS, PDL)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             ZERO, GROUPS, TILES, STEPS, ACT, PDL)),
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             ONE, GROUPS, TILES, STEPS, ACT, PDL)),
                (_ask_for_weights, (w_desc, w_ring, full, free, first, column, turn, GROUPS, STEPS, ACT)),
                (_ask_for_input, (x_desc, x_ring, full, free, row, column, turn, TILES, STEPS, PDL)),
            ],
            [4, 1, 1],
            [OTHERS, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             ZERO, GROUPS, TILES, STEPS, ACT, PDL)),
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             ONE, GROUPS, TILES, STEPS, ACT, PDL)),
                (_multiply, (w_ring, x_ring, full, free, residual_ptr, out_ptr, part_ptr, T, N, residual_stride,
                             TWO, GROUPS, TILES, STEPS, ACT, PDL)),
                (_ask_for_weights, (w_desc, w_ring, full, free, first, column, turn, GROUPS, STEPS, ACT)),
                (_ask_for_input, (x_desc, x_ring, full, free, row, column, turn, TILES, STEPS, PDL)),
            ],
            [4, 4, 1, 1],
            [OTHERS, OTHERS, 24, 24],
        )  # fmt: skip
