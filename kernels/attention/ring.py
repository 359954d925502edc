"""Attention of decode rows whose warps have one task each: one asks for pages, as far ahead as a ring of buffers goes, four attend.

A program's pages are a piece of one long sequence (`deal.py`), so that all end at once, and the ring goes on from one row to the next. Old
keys and values depend on no kernel just before: the ring fills while that still runs. Norm and rotation of queries and of the new key, and
its cache write, are part of a row's beginning. Keys are the tall operand of both products: scores are [keys, queries], sums [dims, queries].

Gluon, as `kernels/linear/ring.py`: for Hopper, and not to be interpreted; elsewhere `decode.py` and `stream.py` compute the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Names of Triton 3.6, and newer ones.
_meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)
KEYS = gl.constexpr(64)  # of a buffer
HALF = gl.constexpr(64)  # of a head's values, which a copy brings


@gluon.jit
def _as_tiles(boxes, COUNT: gl.constexpr):
    """The ring's boxes [.., PAGE, HALF], which lie one after the other, as tiles [COUNT, KEYS, HALF]."""
    if hasattr(boxes, "_reinterpret"):
        return boxes._reinterpret(boxes.dtype, [COUNT, KEYS, HALF], boxes.layout)
    else:
        return boxes.reinterpret(boxes.dtype, [COUNT, KEYS, HALF], boxes.layout)


@gluon.jit
def _piece(borders_ptr):
    """First unit and page of the program's piece, unit and page where it ends, whether that unit has pages of the piece, units in all."""
    border = borders_ptr + gl.program_id(0) * 4
    unit = gl.load(border)
    page = gl.load(border + 1)
    end_unit = gl.load(border + 4)
    end_page = gl.load(border + 5)
    cut = (end_page > gl.where(unit == end_unit, page, 0)).to(gl.int32)
    return unit, page, end_unit, end_page, cut, end_unit - unit + cut


@gluon.jit
def _nth(n, unit, page, end_unit, end_page, cut, query_len_ptr, seq_len_ptr, N, PAGE: gl.constexpr):
    """The piece's n-th unit: the one that ends elsewhere comes first, so that its other parts need not be waited for in the end.

    Returns unit, row, first and end page, old keys of the row, and whether it ends elsewhere.
    """
    last = (n == 0) & (cut == 1)
    this = gl.where(last, end_unit, unit + n - cut)
    row = this % N
    keys = gl.load(seq_len_ptr + row) - gl.load(query_len_ptr + row)
    first = gl.where(this == unit, page, 0)
    end = gl.where(last, end_page, gl.maximum((keys + PAGE - 1) // PAGE, 1))
    return this, row, first, end, keys, last


@gluon.jit
def _ask(
    desc, ring, full, free, borders_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, page_rows, N,
    NUM_KV: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One warp: pages of the piece into ring [slots * 4 * KEYS / PAGE, PAGE, HALF]: halves of keys, then of values."""
    AT_ONCE: gl.constexpr = KEYS // PAGE
    SLOTS: gl.constexpr = ring.shape[0] // (4 * AT_ONCE)
    unit, page, end_unit, end_page, cut, count = _piece(borders_ptr)
    turn = 0
    for n in range(count):
        this, row, first, end, keys, _ = _nth(n, unit, page, end_unit, end_page, cut, query_len_ptr, seq_len_ptr, N, PAGE)
        end = gl.minimum(end, (keys + PAGE - 1) // PAGE)
        column = this // N * D
        table = table_ptr + row.to(gl.int64) * table_row
        for block in range(first, gl.maximum(end, first + 1), AT_ONCE):
            slot = turn % SLOTS
            places = ()
            for i in gl.static_range(AT_ONCE):
                number = gl.load(table + block + i, mask=block + i < end, other=0)
                places = places + (gl.where(block + i < end, number * page_rows, -PAGE),)  # past the end: zeros
            mbarrier.wait(free.index(slot), (turn // SLOTS + 1) & 1)
            mbarrier.expect(full.index(slot), 4 * KEYS * HALF * 2)
            for i in gl.static_range(AT_ONCE):
                for part in gl.static_range(4):
                    to = ring.index((slot * 4 + part) * AT_ONCE + i)
                    _copy(desc, [places[i], column + (part // 2) * (NUM_KV * D) + part % 2 * HALF], full.index(slot), to)
            turn += 1


@gluon.jit
def _normed(a, b, weight_ptr, dim, eps, D: gl.constexpr, HAS_NORM: gl.constexpr):
    """Both halves [B, D / 2] of heads, normed as `kernels.norm.reference.rms_norm` does, in float32."""
    dtype: gl.constexpr = a.dtype
    a = a.to(gl.float32)
    b = b.to(gl.float32)
    if HAS_NORM:
        factor = gl.rsqrt(gl.sum(a * a + b * b, 1) / D + eps)[:, None]
        first = gl.load(weight_ptr + dim)[None, :]
        second = gl.load(weight_ptr + HALF + dim)[None, :]
        if first.dtype == gl.float32:
            a = (a * factor * first).to(dtype).to(gl.float32)
            b = (b * factor * second).to(dtype).to(gl.float32)
        else:
            a = ((a * factor).to(dtype).to(gl.float32) * first.to(gl.float32)).to(dtype).to(gl.float32)
            b = ((b * factor).to(dtype).to(gl.float32) * second.to(gl.float32)).to(dtype).to(gl.float32)
    return a, b


@gluon.jit
def _begin_unit(
    qkv_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, q_ring, row, head, query_len, whole_end, factor, eps,
    qkv_token, page_rows, cos_sin_token,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, HAS_NORM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Queries, normed and rotated, into q_ring [2, 8, HALF]; the part with the row's end (whole_end) keeps the new key and value, too.

    Returns sums [HALF, 8] of both halves, largest [8] and total [KEYS, 8], of the new key alone.
    """
    B: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    m = gl.arange(0, 8, layout=gl.SliceLayout(1, B))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, B))
    every = gl.zeros([8, 1], gl.int32, B)
    token = qkv_ptr + row.to(gl.int64) * qkv_token
    head_at = token + ((head * GROUP + m) * D)[:, None] + dim[None, :]
    new_at = token + (NUM_KV * GROUP + head) * D + every + dim[None, :]
    ok = (m < GROUP)[:, None] & (dim < HALF)[None, :]
    turns = cos_sin_ptr + row.to(gl.int64) * cos_sin_token + dim
    wide = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    value_at = token + (NUM_KV * GROUP + NUM_KV + head) * D
    slot = gl.load(slots_ptr + row)
    a = gl.load(head_at, mask=ok, other=0.0)
    b = gl.load(head_at + HALF, mask=ok, other=0.0)
    c = gl.load(new_at)
    d = gl.load(new_at + HALF)
    v0 = gl.load(value_at + wide)
    v1 = gl.load(value_at + HALF + wide)
    v_a = gl.load(value_at + every + dim[None, :])
    v_b = gl.load(value_at + HALF + every + dim[None, :])
    cos = gl.load(turns)[None, :]
    sin = gl.load(turns + HALF)[None, :]
    dtype: gl.constexpr = a.dtype
    a, b = _normed(a, b, q_norm_ptr, dim, eps, D, HAS_NORM)
    c, d = _normed(c, d, k_norm_ptr, dim, eps, D, HAS_NORM)
    q_a = (a * cos - b * sin).to(dtype)
    q_b = (b * cos + a * sin).to(dtype)
    k_a = (c * cos - d * sin).to(dtype)
    k_b = (d * cos + c * sin).to(dtype)
    q_ring.index(0).store(q_a)
    q_ring.index(1).store(q_b)
    place = cache_ptr + (slot // PAGE * page_rows + slot % PAGE) * (2 * NUM_KV * D) + head * D + every + dim[None, :]
    write = whole_end & (slot >= 0) & (m == 0)[:, None] & (dim < HALF)[None, :]
    gl.store(place, k_a, mask=write)
    gl.store(place + HALF, k_b, mask=write)
    gl.store(place + NUM_KV * D, v_a, mask=write)
    gl.store(place + NUM_KV * D + HALF, v_b, mask=write)
    score = gl.sum(q_a.to(gl.float32) * k_a.to(gl.float32) + q_b.to(gl.float32) * k_b.to(gl.float32), 1) * factor
    there = whole_end & (query_len > 0)
    largest = gl.where(there, gl.convert_layout(score, gl.SliceLayout(0, LAYOUT)), LOWEST)
    zeros = gl.zeros([HALF, 8], gl.float32, LAYOUT)
    acc0 = gl.where(there, zeros + v0.to(gl.float32)[:, None], 0.0)
    acc1 = gl.where(there, zeros + v1.to(gl.float32)[:, None], 0.0)
    total = gl.where(there & (wide == 0)[:, None], zeros + 1.0, 0.0)
    return acc0, acc1, largest, total


@gluon.jit
def _clear_values(v, first_key, end):
    """Zeros for values [KEYS, HALF] of keys that are not there: no number, times zero, is none."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, B))
    x = v.load(B)
    v.store(gl.where((key < end)[:, None], x, gl.zeros([KEYS, HALF], x.dtype, B)))


@gluon.jit
def _add_parts(outputs_ptr, sums_ptr, first, parts, GROUP: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of a unit's parts, in their order: as `_begin_unit` returns them, but for total [8]."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    wide = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    within = m[None, :] * D + wide[:, None]
    ok = (m < GROUP)[None, :] & (wide < HALF)[:, None]
    acc0 = gl.zeros([HALF, 8], gl.float32, LAYOUT)
    acc1 = gl.zeros([HALF, 8], gl.float32, LAYOUT)
    largest = gl.full([8], LOWEST, gl.float32, gl.SliceLayout(0, LAYOUT))
    total = gl.zeros([8], gl.float32, gl.SliceLayout(0, LAYOUT))
    for part in range(parts):
        slot = 2 * (first + part) + (part < parts - 1).to(gl.int32)
        its_largest = gl.load(sums_ptr + slot * 16 + m, cache_modifier=".cg")
        its_total = gl.load(sums_ptr + slot * 16 + 8 + m, cache_modifier=".cg")
        output = outputs_ptr + slot * (GROUP * D) + within
        x0 = gl.load(output, mask=ok, other=0.0, cache_modifier=".cg")
        x1 = gl.load(output + HALF, mask=ok, other=0.0, cache_modifier=".cg")
        new = gl.maximum(largest, its_largest)
        shrink = gl.exp2(largest - new)
        its_shrink = gl.exp2(its_largest - new)
        acc0 = acc0 * shrink[None, :] + x0 * its_shrink[None, :]
        acc1 = acc1 * shrink[None, :] + x1 * its_shrink[None, :]
        total = total * shrink + its_total * its_shrink
        largest = new
    return acc0, acc1, total


@gluon.jit
def _keep_part(acc0, acc1, largest, total, outputs_ptr, sums_ptr, slot, GROUP: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """A part's sums into its slot."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    wide = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    ok = (m < GROUP)[None, :] & (wide < HALF)[:, None]
    output = outputs_ptr + slot * (GROUP * D) + m[None, :] * D + wide[:, None]
    gl.store(output, acc0, mask=ok)
    gl.store(output + HALF, acc1, mask=ok)
    gl.store(sums_ptr + slot * 16 + m, largest)
    gl.store(sums_ptr + slot * 16 + 8 + m, total)


@gluon.jit
def _store_unit(acc0, acc1, total, query_len, out_ptr, GROUP: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """A unit's result to out_ptr, where its row's first query head begins."""
    m = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    wide = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    ok = (m < GROUP)[None, :] & (wide < HALF)[:, None]
    factor = gl.where((total > 0.0) & (query_len > 0), 1.0 / total, 0.0)[None, :]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    at = out_ptr + m[None, :] * D + wide[:, None]
    gl.store(at, (acc0 * factor).to(dtype), mask=ok)
    gl.store(at + HALF, (acc1 * factor).to(dtype), mask=ok)


@gluon.jit
def _attend(
    ring, tiles, full, free, q_ring, p_tile, qkv_ptr, cache_ptr, out_ptr, borders_ptr, arrivals_ptr, outputs_ptr, sums_ptr,
    query_len_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, page_rows, cos_sin_token, N,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The other warps: attention over what has arrived."""
    AT_ONCE: gl.constexpr = KEYS // PAGE
    SLOTS: gl.constexpr = tiles.shape[0] // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 16])
    key_of = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    factor = scale * LOG2E
    unit, page, end_unit, end_page, cut, count = _piece(borders_ptr)
    if PDL:
        gdc_wait()
    turn = 0
    for n in range(count):
        this, row, first, end, keys, last = _nth(n, unit, page, end_unit, end_page, cut, query_len_ptr, seq_len_ptr, N, PAGE)
        head = this // N
        query_len = gl.load(query_len_ptr + row)
        acc0, acc1, largest, total = _begin_unit(
            qkv_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, q_ring, row, head, query_len, last == 0, factor, eps,
            qkv_token, page_rows, cos_sin_token, NUM_KV, GROUP, PAGE, D, HAS_NORM, LAYOUT,
        )  # fmt: skip
        fence_async_shared()
        _meet()
        there = gl.minimum(keys, end * PAGE)
        for block in range(first, end, AT_ONCE):
            slot = turn % SLOTS
            mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
            scores = gl.zeros([KEYS, 8], gl.float32, LAYOUT)
            scores = warpgroup_mma(tiles.index(slot * 4), q_ring.index(0).permute([1, 0]), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(tiles.index(slot * 4 + 1), q_ring.index(1).permute([1, 0]), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if (block + AT_ONCE) * PAGE > there:
                _clear_values(tiles.index(slot * 4 + 2), block * PAGE, there)
                _clear_values(tiles.index(slot * 4 + 3), block * PAGE, there)
            scores = gl.where((block * PAGE + key_of < there)[:, None], scores * factor, float("-inf"))
            new = gl.maximum(largest, gl.max(scores, 0))
            weights = gl.exp2(scores - new[None, :])
            shrink = gl.exp2(largest - new)[None, :]
            largest = new
            total = total * shrink + weights
            acc0 *= shrink
            acc1 *= shrink
            p_tile.store(gl.permute(weights.to(p_tile.dtype), [1, 0]))
            fence_async_shared()
            _meet()  # all warps have written, and are done with the block before
            mbarrier.arrive(free.index((turn + SLOTS - 1) % SLOTS), pred=turn > 0)
            p = p_tile.permute([1, 0])
            acc0 = warpgroup_mma(tiles.index(slot * 4 + 2).permute([1, 0]), p, acc0, is_async=True)
            acc1 = warpgroup_mma(tiles.index(slot * 4 + 3).permute([1, 0]), p, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            turn += 1

        sums = gl.sum(total, 0)
        out = out_ptr + (row.to(gl.int64) * NUM_KV + head) * (GROUP * D)
        if (last == 0) & (first == 0):
            _store_unit(acc0, acc1, sums, query_len, out, GROUP, D, LAYOUT)
        else:
            border = borders_ptr + (gl.program_id(0) + last.to(gl.int32)) * 4
            starts = gl.load(border + 2)
            parts = gl.load(border + 3)
            _keep_part(acc0, acc1, largest, sums, outputs_ptr, sums_ptr, 2 * gl.program_id(0) + last.to(gl.int32), GROUP, D, LAYOUT)
            _meet()  # all threads' stores come before the one atomic
            arrived = gl.atomic_add(arrivals_ptr + this, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                acc0, acc1, sums = _add_parts(outputs_ptr, sums_ptr, starts, parts, GROUP, D, LAYOUT)
                _store_unit(acc0, acc1, sums, query_len, out, GROUP, D, LAYOUT)
                gl.store(arrivals_ptr + this, 0)  # for the next layer


@gluon.jit(do_not_specialize=["N", "table_row"])
def decode_ring(
    desc, qkv_ptr, cache_ptr, out_ptr, borders_ptr, arrivals_ptr, outputs_ptr, sums_ptr, query_len_ptr, seq_len_ptr, table_ptr,
    q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, table_row, page_rows, cos_sin_token, N,
    NUM_KV: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out [N, H, D] of one query each of N rows, whose new keys and values are written. Program p: a piece of `deal.deal_pages`.

    desc: of the layer's cache as [tokens, 2 * HK * D] in blocks [PAGE, HALF]. qkv_ptr: the projection's output. SLOTS: buffers of KEYS.
    """
    if PDL:
        gdc_launch_dependents()
    BOXES: gl.constexpr = 4 * KEYS // PAGE
    ring = gl.allocate_shared_memory(desc.dtype, [SLOTS * BOXES, PAGE, HALF], desc.layout)
    tiles = _as_tiles(ring, SLOTS * 4)
    q_ring = gl.allocate_shared_memory(desc.dtype, [2, 8, HALF], desc.layout)
    p_tile = gl.allocate_shared_memory(desc.dtype, [8, KEYS], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (
                _attend,
                (ring, tiles, full, free, q_ring, p_tile, qkv_ptr, cache_ptr, out_ptr, borders_ptr, arrivals_ptr, outputs_ptr, sums_ptr,
                 query_len_ptr, seq_len_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, scale, eps, qkv_token, page_rows,
                 cos_sin_token, N, NUM_KV, GROUP, PAGE, D, HAS_NORM, PDL),
            ),
            (
                _ask,
                (desc, ring, full, free, borders_ptr, query_len_ptr, seq_len_ptr, table_ptr, table_row, page_rows, N, NUM_KV, PAGE, D),
            ),
        ],
        [1],
        [64],
    )  # fmt: skip
