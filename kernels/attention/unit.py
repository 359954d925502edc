"""What decode attention does at the beginning of a unit (a chunk of a row's keys, for one key head), with each block, and at its end.

Letters as in `decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.attention.heads import partner_of, rotated, turn_factors
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, matmul


@triton.jit
def scores_of(
    q, k, key, position, first, end, scale, softcap, window, ONE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Masked scores [M, S], scaled only if they are capped. q: [M, D]. k: [S, D]. key: [S]. position: [M]. Keys outside [first, end) are
    not there. ONE: a row has one query, which sees all keys that are there."""
    scores = matmul(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if HAS_SOFTCAP:
        scores = capped(scores, scale, softcap)
    visible = key[None, :] < end
    if HAS_WINDOW:
        visible &= key[None, :] >= first
    if not ONE:
        visible &= key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key[None, :] > position[:, None] - window
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def combine(
    partial_ptr, lse_ptr, first_slot, splits, head, NUM_KV: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum a row's chunks in their order: acc [M, BLOCK_D] as in `fold`; largest and total likewise, but for each element of acc.

    Every thread has all that its elements need, so that threads exchange nothing.
    """
    row, dim = tl.arange(0, M)[:, None], tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    largest = tl.full([M, BLOCK_D], LOWEST, tl.float32)
    total = tl.zeros([M, BLOCK_D], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        scores = ()
        parts = ()
        for i in tl.static_range(AT_ONCE):
            split = begin + i + row * 0
            place = ((first_slot + split).to(tl.int64) * NUM_KV + head) * ROWS + row
            there = (row < ROWS) & (dim < D) & (split < splits)
            # Other multiprocessors wrote these: past the first-level cache.
            score = tl.load(lse_ptr + place * D + dim, mask=there, other=LOWEST, cache_modifier=".cg")
            part = tl.load(partial_ptr + place * D + dim, mask=there, other=0.0, cache_modifier=".cg")
            scores = scores + (score,)  # type: ignore[assignment]  # noqa: RUF005 - the compiler takes no unpacking
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        new = largest
        for i in tl.static_range(AT_ONCE):
            new = tl.maximum(new, scores[i])
        shrink = tl.exp2(largest - new)
        acc *= shrink
        total *= shrink
        largest = new
        for i in tl.static_range(AT_ONCE):
            share = tl.exp2(scores[i] - new)
            acc += parts[i] * share
            total += share
    return acc, largest, total


@triton.jit
def repeated(x, M: tl.constexpr):
    """x [T] or [T, D] as often as fills M rows."""
    T: tl.constexpr = x.shape[0]
    if T == M:
        return x
    elif len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], [M // T, T]), [M])
    else:
        return tl.reshape(tl.broadcast_to(x[None, :, :], [M // T, T, x.shape[1]]), [M, x.shape[1]])


@triton.jit
def start_row(
    q_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, row, head, split, splits, query_len, scale, softcap, eps,
    q_token, q_head, page_rows, cos_sin_token,
    PAGE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a row's queries and new key; the last chunk's program writes new key and value, and attends to them.

    Returns the queries [M, D] and acc, largest and total of `fold`.
    """
    T: tl.constexpr = BLOCK_M if GROUP > 8 else 8  # rows of the tile, few for the sake of registers
    dim, m = tl.arange(0, BLOCK_D), tl.arange(0, T)
    partner = partner_of(dim, R)
    q_at = q_ptr + row * q_token + (head * GROUP + m % GROUP)[:, None].to(tl.int64) * q_head
    q_ok = (m < GROUP)[:, None] & (dim < D)[None, :]
    # The key goes through the same tile as the queries, all rows alike: then the threads of a row need nothing from others.
    every = tl.zeros([T, 1], tl.int64)
    new_at = q_ptr + row * q_token + (NUM_KV * GROUP + head) * q_head + every
    slot = tl.load(slots_ptr + row)
    cos, sin = turn_factors(cos_sin_ptr + row * cos_sin_token + every, dim[None, :], R)
    last = m * 0 + split == splits - 1
    new_ok = last[:, None] & (dim < D)[None, :]
    q = tl.load(q_at + dim[None, :], mask=q_ok, other=0.0)
    q_partner = tl.load(q_at + partner[None, :], mask=q_ok, other=0.0)
    k = tl.load(new_at + dim[None, :], mask=new_ok, other=0.0)
    k_partner = tl.load(new_at + partner[None, :], mask=new_ok, other=0.0)
    v = tl.load(new_at + NUM_KV * q_head + dim[None, :], mask=new_ok, other=0.0).to(cache_ptr.dtype.element_ty)
    q = rotated(q, q_partner, q_norm_ptr + every, dim[None, :], partner[None, :], cos, sin, eps, D, HAS_NORM)
    k = rotated(k, k_partner, k_norm_ptr + every, dim[None, :], partner[None, :], cos, sin, eps, D, HAS_NORM)
    k = k.to(cache_ptr.dtype.element_ty)
    write = new_ok & (m == 0)[:, None] & (every <= slot)
    place = cache_ptr + (slot // PAGE * page_rows + slot % PAGE) * (2 * NUM_KV * D) + head * D + every + dim[None, :]
    tl.store(place, k, mask=write)
    tl.store(place + NUM_KV * D, v, mask=write)
    scores = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1)
    scores = capped(scores, scale, softcap) if HAS_SOFTCAP else scores * (scale * LOG2E)
    there = last & (m * 0 < query_len)
    acc = tl.where(there[:, None], v.to(q.dtype).to(tl.float32), 0.0)
    largest, total = tl.where(there, scores, LOWEST), tl.where(there, 1.0, 0.0)
    return repeated(q, BLOCK_M), repeated(acc, BLOCK_M), repeated(largest, BLOCK_M), repeated(total, BLOCK_M)


@triton.jit
def store_unit(
    acc, largest, total, row, query_len, slot, head, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the result of a row's only chunk (slot < 0), or a chunk's partial result."""
    m, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = m // GROUP
    m_ok = (m < ROWS)[:, None] & (dim < D)[None, :]
    if slot < 0:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
            acc, total = add_sink(acc, largest, total, sink)
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        head_out = (head * GROUP + m % GROUP)[:, None] * D + dim[None, :]
        token_out = (row.to(tl.int64) * (ROWS // GROUP) + query)[:, None] * (NUM_KV * GROUP * D)
        result = tl.where((query < query_len)[:, None], result, 0.0)
        tl.store(out_ptr + token_out + head_out, result.to(out_ptr.dtype.element_ty), mask=m_ok)
    else:
        mine = (slot.to(tl.int64) * NUM_KV + head) * ROWS + m
        some = tl.where(total > 0.0, total, 1.0)
        tl.store(partial_ptr + mine[:, None] * D + dim[None, :], acc / some[:, None], mask=m_ok)
        lse = tl.where(total > 0.0, largest + tl.log2(some), LOWEST)
        tl.store(lse_ptr + mine[:, None] * D + dim[None, :], tl.broadcast_to(lse[:, None], [BLOCK_M, BLOCK_D]), mask=m_ok)


@triton.jit
def combine_row(
    row, query_len, first_slot, splits, head, out_ptr, arrivals_ptr, partial_ptr, lse_ptr, sinks_ptr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M_OUT: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the result of a row whose chunks have all arrived, for one key head."""
    acc, largest, total = combine(partial_ptr, lse_ptr, first_slot, splits, head, NUM_KV, ROWS, M_OUT, D, BLOCK_D, AT_ONCE)
    r, dim = tl.arange(0, M_OUT)[:, None], tl.arange(0, BLOCK_D)[None, :]
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + r % GROUP + dim * 0).to(tl.float32) * LOG2E
        top = tl.maximum(largest, sink)
        acc *= tl.exp2(largest - top)
        total = total * tl.exp2(largest - top) + tl.exp2(sink - top)
    result = acc / tl.where(total > 0.0, total, 1.0)
    result = tl.where(r // GROUP < query_len, result, 0.0)
    token = row.to(tl.int64) * (ROWS // GROUP) + r // GROUP
    place = token * (NUM_KV * GROUP * D) + (head * GROUP + r % GROUP) * D + dim
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=(r < ROWS) & (dim < D))
    tl.store(arrivals_ptr + row * NUM_KV + head, 0)  # for the next layer
