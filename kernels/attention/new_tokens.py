"""What decode attention does with a row's new tokens where the step's own keys and values are not in the cache yet."""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.attention.heads import partner_of, rotated, turn_factors
from modelrunner.kernels.attention.scaled import factors, stored
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, capped


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
    k_scale, v_scale, q_token, q_head, page_rows, cos_sin_token,
    PAGE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    IN_HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a row's queries and new key; the last chunk's program writes new key and value, and attends to them.

    scale: on products with keys as they are kept. k_scale, v_scale: the head's, with HAS_SCALES. Returns the queries' `factors` [M, D] and
    acc, largest and total of `fold`, acc in values as they are kept.
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
    v = tl.load(new_at + NUM_KV * q_head + dim[None, :], mask=new_ok, other=0.0)
    v = stored(v, v_scale, cache_ptr.dtype.element_ty, HAS_SCALES)
    q = rotated(q, q_partner, q_norm_ptr + every, dim[None, :], partner[None, :], cos, sin, eps, D, HAS_NORM)
    k = rotated(k, k_partner, k_norm_ptr + every, dim[None, :], partner[None, :], cos, sin, eps, D, HAS_NORM)
    k = stored(k, k_scale, cache_ptr.dtype.element_ty, HAS_SCALES)
    write = new_ok & (m == 0)[:, None] & (every <= slot)
    place = cache_ptr + (slot // PAGE * page_rows + slot % PAGE) * (2 * NUM_KV * D) + head * D + every + dim[None, :]
    tl.store(place, k, mask=write)
    tl.store(place + NUM_KV * D, v, mask=write)
    scores = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1)
    scores = capped(scores, scale, softcap) if HAS_SOFTCAP else scores * (scale * LOG2E)
    there = last & (m * 0 < query_len)
    acc = tl.where(there[:, None], v.to(q.dtype).to(tl.float32), 0.0)
    largest, total = tl.where(there, scores, LOWEST), tl.where(there, 1.0, 0.0)
    return repeated(factors(q, IN_HALF), BLOCK_M), repeated(acc, BLOCK_M), repeated(largest, BLOCK_M), repeated(total, BLOCK_M)


@triton.jit
def start_rows(
    q_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, first_token, head, split, splits, query_len, scale, softcap, eps,
    window, k_scale, v_scale, q_token, q_head, page_rows, cos_sin_token,
    PAGE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, IN_HALF: tl.constexpr,
):  # fmt: skip
    """`start_row` of a row with several tokens, which attend to each other: the last chunk's program takes their keys one by one."""
    T: tl.constexpr = BLOCK_M if QUERIES * GROUP > 8 else 8
    dim, m = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, T)
    query = tl.minimum(m // GROUP, QUERIES - 1)
    partner = partner_of(tl.arange(0, BLOCK_D), R)[None, :]
    every = tl.zeros([T, 1], tl.int64)
    inside = dim < D
    q_at = q_ptr + (first_token + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None].to(tl.int64) * q_head
    q_ok = (m < QUERIES * GROUP)[:, None] & inside
    last = m * 0 + split == splits - 1
    new_ok = last[:, None] & inside
    q = tl.load(q_at + dim, mask=q_ok, other=0.0)
    q_partner = tl.load(q_at + partner, mask=q_ok, other=0.0)
    cos, sin = turn_factors(cos_sin_ptr + (first_token + query)[:, None] * cos_sin_token, dim, R)
    q = rotated(q, q_partner, q_norm_ptr + every, dim, partner, cos, sin, eps, D, HAS_NORM)
    acc = tl.zeros([T, BLOCK_D], tl.float32)
    largest = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    loaded = ()  # before any store, which no load would pass
    for j in tl.static_range(QUERIES):
        new_at = q_ptr + (first_token + j) * q_token + (NUM_KV * GROUP + head) * q_head + every
        turns = turn_factors(cos_sin_ptr + (first_token + j) * cos_sin_token + every, dim, R)
        k = tl.load(new_at + dim, mask=new_ok, other=0.0)
        k_partner = tl.load(new_at + partner, mask=new_ok, other=0.0)
        v = tl.load(new_at + NUM_KV * q_head + dim, mask=new_ok, other=0.0)
        loaded = loaded + ((k, k_partner, v, turns, tl.load(slots_ptr + first_token + j)),)  # type: ignore[assignment]  # noqa: RUF005
    kept = ()
    for j in tl.static_range(QUERIES):
        k, k_partner, v, turns, slot = loaded[j]  # type: ignore[var-annotated]
        v = stored(v, v_scale, cache_ptr.dtype.element_ty, HAS_SCALES)
        k = rotated(k, k_partner, k_norm_ptr + every, dim, partner, turns[0], turns[1], eps, D, HAS_NORM)
        k = stored(k, k_scale, cache_ptr.dtype.element_ty, HAS_SCALES)
        kept = kept + ((k, v),)  # type: ignore[assignment]  # noqa: RUF005
        scores = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1)
        scores = capped(scores, scale, softcap) if HAS_SOFTCAP else scores * (scale * LOG2E)
        visible = last & (m * 0 + j < query_len) & (query >= j)
        if HAS_WINDOW:
            visible &= query - j < window
        scores = tl.where(visible, scores, LOWEST)
        new = tl.maximum(largest, scores)
        shrink, weight = tl.exp2(largest - new), tl.where(visible, tl.exp2(scores - new), 0.0)
        acc = acc * shrink[:, None] + weight[:, None] * v.to(q.dtype).to(tl.float32)
        total = total * shrink + weight
        largest = new
    for j in tl.static_range(QUERIES):
        slot = loaded[j][4]
        write = new_ok & (m == 0)[:, None] & (every <= slot)
        place = cache_ptr + (slot // PAGE * page_rows + slot % PAGE) * (2 * NUM_KV * D) + head * D + every + dim
        tl.store(place, kept[j][0], mask=write)
        tl.store(place + NUM_KV * D, kept[j][1], mask=write)
    return repeated(factors(q, IN_HALF), BLOCK_M), repeated(acc, BLOCK_M), repeated(largest, BLOCK_M), repeated(total, BLOCK_M)
