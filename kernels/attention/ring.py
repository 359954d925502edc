"""Attention of decode rows whose warps have one task each: one asks for pages, as far ahead as a ring of buffers goes, four attend.

A program's pages are a piece of one long sequence (`deal.py`), so that all end at once, and the ring goes on from one row to the next. Old
keys and values depend on no kernel just before: the ring fills while that still runs. Norm and rotation of queries and of the new key, and
its cache write, are part of a unit. Keys and values are the tall operands: scores are [keys, queries], sums [values, queries].

Gluon, as `kernels/linear/ring.py`: for Hopper, and not to be interpreted; elsewhere `decode.py` and `stream.py` compute the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.ring_pages import HALF, KEYS, ask_for_pages, nth_unit, piece_of

_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of Triton 3.6, and of newer

LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # [warps, keys or values, queries]: a warp has its own keys
FACTOR = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))
OTHER = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # of what a unit begins and ends with, [8, HALF]


@gluon.jit
def _seen_as(boxes, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same memory in another shape."""
    if hasattr(boxes, "_reinterpret"):
        return boxes._reinterpret(boxes.dtype, SHAPE, LAYOUT)
    else:
        return boxes.reinterpret(boxes.dtype, SHAPE, LAYOUT)


@gluon.jit
def _normed(a, b, first, second, eps, D: gl.constexpr, HAS_NORM: gl.constexpr):
    """Both halves [B, D / 2] of heads, normed as `kernels.norm.reference.rms_norm` does, in float32. first, second: the weight's halves."""
    dtype: gl.constexpr = a.dtype
    a = a.to(gl.float32)
    b = b.to(gl.float32)
    if HAS_NORM:
        factor = gl.rsqrt(gl.sum(a * a + b * b, 1) / D + eps)[:, None]
        if first.dtype == gl.float32:
            a = (a * factor * first[None, :]).to(dtype).to(gl.float32)
            b = (b * factor * second[None, :]).to(dtype).to(gl.float32)
        else:
            a = ((a * factor).to(dtype).to(gl.float32) * first[None, :].to(gl.float32)).to(dtype).to(gl.float32)
            b = ((b * factor).to(dtype).to(gl.float32) * second[None, :].to(gl.float32)).to(dtype).to(gl.float32)
    return a, b


@gluon.jit
def _turned(x, weight, turns, eps, D: gl.constexpr, HAS_NORM: gl.constexpr):
    """Halves of heads, normed and rotated."""
    dtype: gl.constexpr = x[0].dtype
    a, b = _normed(x[0], x[1], weight[0], weight[1], eps, D, HAS_NORM)
    cos = turns[0][None, :]
    sin = turns[1][None, :]
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@gluon.jit
def _new_token(
    n, piece, qkv_ptr, cos_sin_ptr, slots_ptr, query_len_ptr, seq_len_ptr, qkv_token, cos_sin_token, N,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The piece's n-th unit, and its row's queries, key, value and angles as they are, halves of each [8, HALF]."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    this, row, first, last = nth_unit(n, piece, N)
    query_len = gl.load(query_len_ptr + row)
    keys = gl.load(seq_len_ptr + row) - query_len
    end = gl.where(last, piece[3], gl.maximum((keys + PAGE - 1) // PAGE, 1))
    head = gl.minimum(this // N, NUM_KV - 1)
    token = qkv_ptr + row.to(gl.int64) * qkv_token
    every = gl.zeros([8, 1], gl.int32, ROWS)
    q_at = token + ((head * GROUP + m) * D)[:, None] + dim[None, :]
    k_at = token + (NUM_KV * GROUP + head) * D + every + dim[None, :]
    ok = (m < GROUP)[:, None] & (dim < HALF)[None, :]
    turns = cos_sin_ptr + row.to(gl.int64) * cos_sin_token + dim
    q = (gl.load(q_at, mask=ok, other=0.0), gl.load(q_at + HALF, mask=ok, other=0.0))
    k = (gl.load(k_at), gl.load(k_at + HALF))
    v = (gl.load(k_at + NUM_KV * D), gl.load(k_at + NUM_KV * D + HALF))
    turn = (gl.load(turns), gl.load(turns + HALF))
    return (this, row, head, first, end, keys, last, query_len, gl.load(slots_ptr + row)), q, k, v, turn


@gluon.jit
def _as_factor(weights, LAYOUT: gl.constexpr):
    """Weights [4, 16, 8] of 16 bits, as a product left them, as the next product's second factor: each warp turns two matrices of 8 x 8."""
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=False, pack=2
    )
    turned = gl.reshape(gl.permute(gl.reshape(turned, [4, 2, 8, 8]), [0, 1, 3, 2]), [4, 16, 8])
    return gl.convert_layout(turned, LAYOUT, assert_trivial=True)


@gluon.jit
def _add_buffer(tiles, free, slot, q0, q1, sums, first_key, end, factor):
    """Each warp adds a quarter of a buffer to its sums: acc [4, HALF, 8] twice, largest [4, 8] and total [4, 16, 8], as of `fold`."""
    acc0, acc1, largest, total = sums
    dtype: gl.constexpr = tiles.dtype
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    key = first_key + warp * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    scores = mma_v2(tiles.index(slot * 4).load(FACTOR), q0, gl.zeros([4, 16, 8], gl.float32, MMA))
    scores += mma_v2(tiles.index(slot * 4 + 1).load(FACTOR), q1, gl.zeros([4, 16, 8], gl.float32, MMA))
    scores = gl.where(key < end, scores, float("-inf"))
    new = gl.maximum(largest, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new[:, None, :])
    shrink = gl.exp2(largest - new)[:, None, :]
    v0 = tiles.index(slot * 4 + 2).permute([0, 2, 1]).load(FACTOR)
    v1 = tiles.index(slot * 4 + 3).permute([0, 2, 1]).load(FACTOR)
    _meet()
    mbarrier.arrive(free.index(slot))
    if first_key + KEYS > end:  # no number, times zero, is none
        of_warp = first_key + 16 * gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, FACTOR)))[:, None, None]
        there = of_warp + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, FACTOR)))[None, None, :] < end
        v0 = gl.where(there, v0, gl.zeros([4, HALF, 16], dtype, FACTOR))
        v1 = gl.where(there, v1, gl.zeros([4, HALF, 16], dtype, FACTOR))
    p = _as_factor(weights.to(dtype), OTHER)
    return mma_v2(v0, p, acc0 * shrink), mma_v2(v1, p, acc1 * shrink), new, total * shrink + weights


@gluon.jit
def _joined(sums, acc_tile, sums_tile):
    """Sums of the four warps together, see `_add_buffer` -> acc [8, HALF] twice, largest and total [8], in ROWS."""
    FOUR: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    sums_tile.index(0).store(sums[2])
    sums_tile.index(1).store(gl.sum(sums[3], 1))
    acc_tile.store(gl.permute(sums[0], [0, 2, 1]))
    _meet()
    tops = sums_tile.index(0).load(gl.SliceLayout(2, FOUR))
    top = gl.max(tops, 0)
    share = gl.exp2(tops - top[None, :])
    total = gl.sum(sums_tile.index(1).load(gl.SliceLayout(2, FOUR)) * share, 0)
    acc0 = gl.sum(acc_tile.load(FOUR) * share[:, :, None], 0)
    _meet()
    acc_tile.store(gl.permute(sums[1], [0, 2, 1]))
    _meet()
    acc1 = gl.sum(acc_tile.load(FOUR) * share[:, :, None], 0)
    return (
        gl.convert_layout(acc0, ROWS),
        gl.convert_layout(acc1, ROWS),
        gl.convert_layout(top, gl.SliceLayout(1, ROWS)),
        gl.convert_layout(total, gl.SliceLayout(1, ROWS)),
    )


@gluon.jit
def _add_new_key(acc0, acc1, largest, total, q, k, v, factor):
    """The row's new key takes part, too."""
    score = gl.sum(q[0].to(gl.float32) * k[0].to(gl.float32) + q[1].to(gl.float32) * k[1].to(gl.float32), 1) * factor
    new = gl.maximum(largest, score)
    shrink = gl.exp2(largest - new)
    weight = gl.exp2(score - new)
    acc0 = acc0 * shrink[:, None] + v[0].to(gl.float32) * weight[:, None]
    acc1 = acc1 * shrink[:, None] + v[1].to(gl.float32) * weight[:, None]
    return acc0, acc1, new, total * shrink + weight


@gluon.jit
def _write_new_key(key_ptr, written, k, v, NUM_KV: gl.constexpr, D: gl.constexpr):
    """A new key, and the value NUM_KV heads after it; [8, HALF] twice, whose rows are alike."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    at = key_ptr + m[:, None] * 0 + dim[None, :]
    write = written & (m == 0)[:, None] & (dim < HALF)[None, :]
    gl.store(at, k[0], mask=write)
    gl.store(at + HALF, k[1], mask=write)
    gl.store(at + NUM_KV * D, v[0], mask=write)
    gl.store(at + NUM_KV * D + HALF, v[1], mask=write)


@gluon.jit
def _add_parts(outputs_ptr, sums_ptr, first, parts, GROUP: gl.constexpr, D: gl.constexpr):
    """Sums [8, HALF] of a unit's parts, in their order, and their total [8]."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    ok = (m < GROUP)[:, None] & (dim < HALF)[None, :]
    acc0 = gl.zeros([8, HALF], gl.float32, ROWS)
    acc1 = gl.zeros([8, HALF], gl.float32, ROWS)
    largest = gl.full([8], LOWEST, gl.float32, gl.SliceLayout(1, ROWS))
    total = gl.zeros([8], gl.float32, gl.SliceLayout(1, ROWS))
    for part in range(parts):
        slot = 2 * (first + part) + (part < parts - 1).to(gl.int32)
        its_largest = gl.load(sums_ptr + slot * 16 + m, cache_modifier=".cg")
        its_total = gl.load(sums_ptr + slot * 16 + 8 + m, cache_modifier=".cg")
        output = outputs_ptr + slot * (GROUP * D) + m[:, None] * D + dim[None, :]
        x0 = gl.load(output, mask=ok, other=0.0, cache_modifier=".cg")
        x1 = gl.load(output + HALF, mask=ok, other=0.0, cache_modifier=".cg")
        new = gl.maximum(largest, its_largest)
        shrink = gl.exp2(largest - new)
        its_shrink = gl.exp2(its_largest - new)
        acc0 = acc0 * shrink[:, None] + x0 * its_shrink[:, None]
        acc1 = acc1 * shrink[:, None] + x1 * its_shrink[:, None]
        total = total * shrink + its_total * its_shrink
        largest = new
    return acc0, acc1, total


@gluon.jit
def _keep_part(acc0, acc1, largest, total, outputs_ptr, sums_ptr, slot, GROUP: gl.constexpr, D: gl.constexpr):
    """A part's sums into its slot."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    ok = (m < GROUP)[:, None] & (dim < HALF)[None, :]
    output = outputs_ptr + slot * (GROUP * D) + m[:, None] * D + dim[None, :]
    gl.store(output, acc0, mask=ok)
    gl.store(output + HALF, acc1, mask=ok)
    gl.store(sums_ptr + slot * 16 + m, largest)
    gl.store(sums_ptr + slot * 16 + 8 + m, total)


@gluon.jit
def _store_unit(acc0, acc1, total, query_len, out_ptr, GROUP: gl.constexpr, D: gl.constexpr):
    """A unit's result to out_ptr, where its row's first query head begins."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    ok = (m < GROUP)[:, None] & (dim < HALF)[None, :]
    total = gl.where(total > 0.0, total, 1.0)[:, None]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    at = out_ptr + m[:, None] * D + dim[None, :]
    gl.store(at, gl.where(query_len > 0, acc0 / total, 0.0).to(dtype), mask=ok)
    gl.store(at + HALF, gl.where(query_len > 0, acc1 / total, 0.0).to(dtype), mask=ok)


@gluon.jit
def _share_unit(
    acc0, acc1, largest, total, unit, last, query_len, out_ptr, pieces_ptr, arrivals_ptr, outputs_ptr, sums_ptr,
    GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Keep a part's sums; whoever is last of a unit's programs stores its result. last: 1 where the unit ends elsewhere."""
    shared = pieces_ptr + gl.program_id(0) * 16 + last * 4
    first = gl.load(shared + 2)
    parts = gl.load(shared + 3)
    _keep_part(acc0, acc1, largest, total, outputs_ptr, sums_ptr, 2 * gl.program_id(0) + last, GROUP, D)
    _meet()  # all threads' stores come before the one atomic
    if gl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu") == parts - 1:
        acc0, acc1, total = _add_parts(outputs_ptr, sums_ptr, first, parts, GROUP, D)
        _store_unit(acc0, acc1, total, query_len, out_ptr, GROUP, D)
        gl.store(arrivals_ptr + unit, 0)  # for the next layer


@gluon.jit
def _attend(
    tiles, full, free, q_tiles, acc_tile, sums_tile, qkv_ptr, cache_ptr, out_ptr, pieces_ptr, arrivals_ptr, outputs_ptr,
    sums_ptr, query_len_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, page_rows,
    cos_sin_token, N,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The other warps: attention over what has arrived, each over a quarter of a buffer's keys, until a unit ends."""
    AT_ONCE: gl.constexpr = KEYS // PAGE
    SLOTS: gl.constexpr = tiles.shape[0] // 4
    dtype: gl.constexpr = tiles.dtype
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROWS))
    factor = scale * LOG2E
    q_weight = (gl.load(q_norm_ptr + dim), gl.load(q_norm_ptr + HALF + dim))
    k_weight = (gl.load(k_norm_ptr + dim), gl.load(k_norm_ptr + HALF + dim))
    piece = piece_of(pieces_ptr)
    count = piece[5]
    if PDL:
        gdc_wait()
    turn = 0
    following = _new_token(
        0, piece, qkv_ptr, cos_sin_ptr, slots_ptr, query_len_ptr, seq_len_ptr, qkv_token, cos_sin_token, N, NUM_KV, GROUP, PAGE, D
    )
    for n in range(count):
        what, q, k, v, turns = following
        this, row, head, first, end, keys, last, query_len, place = what
        new_q = _turned(q, q_weight, turns, eps, D, HAS_NORM)
        new_k = _turned(k, k_weight, turns, eps, D, HAS_NORM)
        q_tiles.index(0).store(new_q[0])
        q_tiles.index(1).store(new_q[1])
        _meet()
        q0 = q_tiles.index(0).permute([1, 0]).load(gl.SliceLayout(0, OTHER))[None, :, :] + gl.zeros([4, HALF, 8], dtype, OTHER)
        q1 = q_tiles.index(1).permute([1, 0]).load(gl.SliceLayout(0, OTHER))[None, :, :] + gl.zeros([4, HALF, 8], dtype, OTHER)
        # What the next unit starts with is on its way while this one's keys are attended to.
        following = _new_token(
            gl.minimum(n + 1, count - 1), piece, qkv_ptr, cos_sin_ptr, slots_ptr, query_len_ptr, seq_len_ptr, qkv_token, cos_sin_token, N,
            NUM_KV, GROUP, PAGE, D,
        )  # fmt: skip
        zeros = gl.zeros([4, HALF, 8], gl.float32, MMA)
        sums = (zeros, zeros, gl.full([4, 8], LOWEST, gl.float32, gl.SliceLayout(1, MMA)), gl.zeros([4, 16, 8], gl.float32, MMA))
        there = gl.minimum(keys, end * PAGE)
        for block in range(first, end, AT_ONCE):
            mbarrier.wait(full.index(turn % SLOTS), (turn // SLOTS) & 1)
            sums = _add_buffer(tiles, free, turn % SLOTS, q0, q1, sums, block * PAGE, there, factor)
            turn += 1

        acc0, acc1, largest, total = _joined(sums, acc_tile, sums_tile)
        if last == 0:  # the new key is the row's last
            acc0, acc1, largest, total = _add_new_key(acc0, acc1, largest, total, new_q, new_k, v, factor)
            written = cache_ptr + (place // PAGE * page_rows + place % PAGE) * (2 * NUM_KV * D) + head * D
            _write_new_key(written, place >= 0, new_k, v, NUM_KV, D)
        out = out_ptr + (row.to(gl.int64) * NUM_KV + head) * (GROUP * D)
        if (last == 0) & (first == 0):
            _store_unit(acc0, acc1, total, query_len, out, GROUP, D)
        else:
            _share_unit(
                acc0, acc1, largest, total, this, last.to(gl.int32), query_len, out, pieces_ptr, arrivals_ptr, outputs_ptr, sums_ptr,
                GROUP, D,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["N", "table_row", "columns"])
def decode_ring(
    desc, qkv_ptr, cache_ptr, out_ptr, pieces_ptr, arrivals_ptr, outputs_ptr, sums_ptr, query_len_ptr, seq_len_ptr, table_ptr,
    q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, table_row, columns, page_rows, cos_sin_token, N,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, ASKING: gl.constexpr,
    HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [N, H, D] of one query each of N rows, whose new keys and values are written. Program p: a piece of `deal.deal_pages`.

    desc: of the layer's cache as [tokens, 2 * HK * D] in blocks [PAGE, HALF]. qkv_ptr: the projection's output. SLOTS: buffers of KEYS.
    """
    if PDL:
        gdc_launch_dependents()
    BOXES: gl.constexpr = 4 * KEYS // PAGE
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[2, 1, 0])
    CUBE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    ring = gl.allocate_shared_memory(desc.dtype, [SLOTS * BOXES, PAGE, HALF], desc.layout)
    tiles = _seen_as(ring, [SLOTS * 4, 4, KEYS // 4, HALF], CUBE)
    q_tiles = gl.allocate_shared_memory(desc.dtype, [2, 8, HALF], desc.layout)
    acc_tile = gl.allocate_shared_memory(gl.float32, [4, 8, HALF], FLAT)
    sums_tile = gl.allocate_shared_memory(gl.float32, [2, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=ASKING)
        mbarrier.init(free.index(slot), count=1)
    if ASKING == 1:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (tiles, full, free, q_tiles, acc_tile, sums_tile, qkv_ptr, cache_ptr, out_ptr, pieces_ptr, arrivals_ptr, outputs_ptr,
                     sums_ptr, query_len_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, page_rows,
                     cos_sin_token, N, NUM_KV, GROUP, PAGE, D, HAS_NORM, PDL),
                ),
                (
                    ask_for_pages,
                    (desc, ring, full, free, pieces_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, columns, page_rows, N,
                     0, 1, NUM_KV, PAGE, D),
                ),
            ],
            [1],
            [56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (tiles, full, free, q_tiles, acc_tile, sums_tile, qkv_ptr, cache_ptr, out_ptr, pieces_ptr, arrivals_ptr, outputs_ptr,
                     sums_ptr, query_len_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, page_rows,
                     cos_sin_token, N, NUM_KV, GROUP, PAGE, D, HAS_NORM, PDL),
                ),
                (
                    ask_for_pages,
                    (desc, ring, full, free, pieces_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, columns, page_rows, N,
                     0, 2, NUM_KV, PAGE, D),
                ),
                (
                    ask_for_pages,
                    (desc, ring, full, free, pieces_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, columns, page_rows, N,
                     1, 2, NUM_KV, PAGE, D),
                ),
            ],
            [1, 1],
            [56, 56],
        )  # fmt: skip
