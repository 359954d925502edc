"""Attention of decode rows: few queries a row, all of whose time goes into reading keys and values once.

The chunks of a row are attended to side by side (flash-decoding, Dao et al. 2023); whichever program finishes a row's last chunk combines
them, in the order of the chunks, so that the result does not depend on who was last. The query heads that share a key head, and all
queries of a row, are rows of one product. Letters as in `work_list.py`; M rows of a product (queries * G, padded), S keys at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.device import launch_options, next_power_of_2, processors
from modelrunner.kernels.attention.heads import partner_of, rotated, turn_factors
from modelrunner.kernels.attention.scaled import HALF_QUERY, factors, head_scales, in_half, stored, values
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, fold, matmul, pages_of, token_offsets
from modelrunner.kernels.attention.work_list import AttentionWork
from modelrunner.kernels.pdl import wait_in_loop

Rotary = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, float]  # q_norm, k_norm, cos_sin, eps

COMBINE_FLOATS = 4096  # of partial results that a program looks at together,
MOST_AT_ONCE = 16  # but of no more chunks: their loop is unrolled, and with heads of 16 values the compiler took minutes over 128


@triton.jit
def scores_of(q, k, key, position, first, end, scale, softcap, window, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Masked scores [M, S], scaled only if they are capped. q: [M, D]. k: [S, D]. key: [S]. position: [M]. Keys outside [first, end) are
    not there."""
    scores = matmul(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if HAS_SOFTCAP:
        scores = capped(scores, scale, softcap)
    visible = (key[None, :] <= position[:, None]) & (key[None, :] < end)
    if HAS_WINDOW:
        visible &= (key[None, :] > position[:, None] - window) & (key[None, :] >= first)
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


@triton.jit(do_not_specialize=["table_row"])  # pages of a step that is not captured are of any number
def decode_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    items_ptr,
    count_ptr,
    arrivals_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    sinks_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    slots_ptr,
    scales_ptr,
    scale,
    softcap,
    window,
    eps,
    q_token,
    q_head,
    table_row,
    page_rows,
    cos_sin_token,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    M_OUT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HOLD: tl.constexpr,
    R: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IN_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """A persistent program: units (item, key head) pid, pid + programs, ...

    R > 0: q is the projection's output, one new token a row, and so much of a head is rotated: this kernel norms and rotates queries and
    new key, and writes new key and value, which it does not read back. What earlier steps wrote is read before the queries are there: the
    list (by an earlier kernel, which ran to its end), and old keys and values: as many as the pipeline holds, or, with HOLD and R = 0, a
    block of them in registers.
    """
    if PDL:
        gdc_launch_dependents()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    ROWS: tl.constexpr = QUERIES * GROUP
    FUSED: tl.constexpr = R > 0
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = items_ptr + unit // NUM_KV * 8
        head = unit % NUM_KV
        key_scale, k_scale, v_scale = head_scales(scales_ptr, head, scale, NUM_KV, HAS_SCALES)
        product_scale = key_scale / HALF_QUERY if IN_HALF else key_scale
        factor = 1.0 if HAS_SOFTCAP else product_scale * LOG2E
        row = tl.load(item)
        start = tl.load(item + 1)
        end = tl.load(item + 2)
        seq_len = tl.load(item + 3)
        query_len = tl.load(item + 4)
        slot = tl.load(item + 5)
        split = tl.load(item + 6)
        splits = tl.load(item + 7)
        table = table_ptr + row.to(tl.int64) * table_row
        k_base = cache_ptr + head * D + dim[None, :]
        v_base = k_base + NUM_KV * D
        computed = seq_len - query_len
        position = tl.where(query < query_len, computed + query, seq_len - 1)
        if FUSED:
            end = tl.minimum(end, computed)
        m_ok = (m < ROWS)[:, None] & (dim < D)[None, :]
        first_token = row.to(tl.int64) * QUERIES
        q_at = q_ptr + (first_token + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None] * q_head
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        begin = start // BLOCK_S * BLOCK_S
        if HOLD:
            key = begin + tl.arange(0, BLOCK_S)
            old = (key >= start) & (key < tl.minimum(end, computed))
            page = pages_of(table, key, (key >= start) & (key < end), PAGE)
            place = token_offsets(page, key, page_rows, PAGE, TOKEN)
            k = tl.load(k_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            v = tl.load(v_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            begin += BLOCK_S
        ahead = begin + tl.arange(0, BLOCK_S)
        next_page = pages_of(table, ahead, (ahead >= start) & (ahead < end), PAGE)
        if FUSED:
            q = factors(tl.zeros([BLOCK_M, BLOCK_D], q_ptr.dtype.element_ty), IN_HALF)
        else:
            if PDL:
                gdc_wait()
            q = factors(tl.load(q_at + dim[None, :], mask=m_ok, other=0.0), IN_HALF)
            if HOLD:
                new = ((key >= start) & (key < end) & (key >= computed))[:, None] & (dim < D)[None, :]
                k = tl.where(old[:, None], k, tl.load(k_base + place, mask=new, other=0.0)).to(q.dtype)
                v = tl.where(old[:, None], v, tl.load(v_base + place, mask=new, other=0.0)).to(q.dtype)
                scores = scores_of(q, k, key, position, start, end, product_scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW)
                acc, largest, total = fold(acc, largest, total, scores, factor, v)
        page = next_page
        # The pipeline's first loads come before the first turn, and so before what that waits for.
        for block in tl.range(begin, tl.maximum(end, begin + 1) if FUSED else end, BLOCK_S):
            if FUSED:  # noqa: SIM102 - known when compiled
                if block == begin:
                    if PDL:
                        wait_in_loop()
                    q, acc, largest, total = start_row(
                        q_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, first_token, head, split, splits, query_len,
                        key_scale, softcap, eps, k_scale, v_scale, q_token, q_head, page_rows, cos_sin_token,
                        PAGE, NUM_KV, GROUP, D, BLOCK_D, BLOCK_M, R, HAS_NORM, HAS_SOFTCAP, HAS_SCALES, IN_HALF,
                    )  # fmt: skip
            key = block + tl.arange(0, BLOCK_S)
            there = (key >= start) & (key < end) if HAS_WINDOW else key < end
            place = token_offsets(page, key, page_rows, PAGE, TOKEN)
            page = pages_of(table, key + BLOCK_S, key + BLOCK_S < end, PAGE)
            there = there[:, None] if D == BLOCK_D else there[:, None] & (dim < D)[None, :]
            k = tl.load(k_base + place, mask=there, other=0.0).to(q.dtype)
            v = values(tl.load(v_base + place, mask=there, other=0.0), q.dtype, IN_HALF)
            scores = scores_of(q, k, key, position, start, end, product_scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW)
            acc, largest, total = fold(acc, largest, total, scores, factor, v)

        if slot < 0:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
                acc, total = add_sink(acc, largest, total, sink)
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
            head_out = (head * GROUP + m % GROUP)[:, None] * D + dim[None, :]
            token_out = (row.to(tl.int64) * QUERIES + query)[:, None] * (NUM_KV * GROUP * D)
            result = tl.where((query < query_len)[:, None], result, 0.0)
            tl.store(out_ptr + token_out + head_out, result.to(out_ptr.dtype.element_ty), mask=m_ok)
        else:
            mine = (slot.to(tl.int64) * NUM_KV + head) * ROWS + m
            some = tl.where(total > 0.0, total, 1.0)
            tl.store(partial_ptr + mine[:, None] * D + dim[None, :], acc / some[:, None], mask=m_ok)
            lse = tl.where(total > 0.0, largest + tl.log2(some), LOWEST)
            tl.store(lse_ptr + mine[:, None] * D + dim[None, :], tl.broadcast_to(lse[:, None], [BLOCK_M, BLOCK_D]), mask=m_ok)
            tl.debug_barrier()  # all threads' stores come before the one atomic
            arrived = tl.atomic_add(arrivals_ptr + row * NUM_KV + head, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                acc_all, largest_all, total_all = combine(
                    partial_ptr, lse_ptr, slot - split, splits, head, NUM_KV, ROWS, M_OUT, D, BLOCK_D, AT_ONCE
                )
                r = tl.arange(0, M_OUT)[:, None]
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + head * GROUP + r % GROUP + dim[None, :] * 0).to(tl.float32) * LOG2E
                    top = tl.maximum(largest_all, sink)
                    acc_all *= tl.exp2(largest_all - top)
                    total_all = total_all * tl.exp2(largest_all - top) + tl.exp2(sink - top)
                result = acc_all / tl.where(total_all > 0.0, total_all, 1.0) * v_scale
                result = tl.where(r // GROUP < query_len, result, 0.0)
                place_out = (first_token + r // GROUP) * (NUM_KV * GROUP * D) + (head * GROUP + r % GROUP) * D + dim[None, :]
                tl.store(out_ptr + place_out, result.to(out_ptr.dtype.element_ty), mask=(r < ROWS) & (dim < D)[None, :])
                tl.store(arrivals_ptr + row * NUM_KV + head, 0)  # for the next layer


def combined_at_once(rows: int, block_dim: int) -> int:
    """Chunks whose partial results, of [rows, block_dim] each, are looked at together."""
    return min(MOST_AT_ONCE, max(2, COMBINE_FLOATS // (rows * block_dim)))


def decode_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    work: AttentionWork,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    rotary: Rotary | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Attention of the tokens of the decode rows, into the first tokens of out: [T, H, D], contiguous.

    q: [T, H, D]. With rotary, q is a view [T, H, D] of the projection's output, in which its keys and values follow; they are written.
    scales: [2, HK] float32 of keys and values, None for a cache without.
    """
    decode = work.decode
    config, device = decode.config, q.device
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    block_dim, rows_out = max(16, next_power_of_2(dim)), next_power_of_2(decode.queries * group)
    programs = min(decode.items.shape[0] * num_kv, processors(device) * config.programs)
    q_norm, k_norm, cos_sin, eps = (None, None, None, 0.0) if rotary is None else rotary
    decode_attention[(programs,)](
        q,
        cache,
        out,
        decode.items,
        decode.count,
        decode.arrivals,
        decode.partial,
        decode.lse,
        work.block_table,
        q if sinks is None else sinks,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q if cos_sin is None else cos_sin,
        work.slots,
        decode.lse if scales is None else scales,
        scale,
        softcap or 0.0,
        work.window or 0,
        eps,
        q.stride(0),
        q.stride(1),
        work.block_table.stride(0),
        work.page_rows,
        0 if cos_sin is None else cos_sin.stride(0),
        NUM_KV=num_kv,
        GROUP=group,
        QUERIES=decode.queries,
        PAGE=cache.shape[1],
        D=dim,
        BLOCK_D=block_dim,
        BLOCK_M=max(16, rows_out),
        BLOCK_S=config.block_keys,
        M_OUT=rows_out,
        AT_ONCE=combined_at_once(rows_out, block_dim),
        HOLD=config.hold and rotary is None,
        R=0 if cos_sin is None else cos_sin.shape[1],
        HAS_NORM=q_norm is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None,
        IN_HALF=in_half(q, cache),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(device),
    )
