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
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, fold, matmul, pages_of, token_offsets
from modelrunner.kernels.attention.work_list import AttentionWork

COMBINE_FLOATS = 8192  # of partial results that a program looks at together


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
    partial_ptr, weights_ptr, first_slot, splits, head, NUM_KV: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum a row's chunks: acc [M, BLOCK_D], largest [M], total [M] as in `fold`."""
    row, dim = tl.arange(0, M), tl.arange(0, BLOCK_D)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    largest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        split = begin + tl.arange(0, AT_ONCE)
        place = ((first_slot + split).to(tl.int64)[:, None] * NUM_KV + head) * ROWS + row[None, :]
        there = (split < splits)[:, None] & (row < ROWS)[None, :]
        # Other multiprocessors wrote these: past the first-level cache.
        scores = tl.load(weights_ptr + place * 2, mask=there, other=LOWEST, cache_modifier=".cg")
        sums = tl.load(weights_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        mask = there[:, :, None] & (dim < D)[None, None, :]
        parts = tl.load(partial_ptr + place[:, :, None] * D + dim[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(scores, 0))
        share = tl.exp2(scores - new[None, :])
        shrink = tl.exp2(largest - new)
        acc = acc * shrink[:, None] + tl.sum(parts * share[:, :, None], 0)
        total = total * shrink + tl.sum(sums * share, 0)
        largest = new
    return acc, largest, total


@triton.jit
def decode_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    items_ptr,
    count_ptr,
    arrivals_ptr,
    partial_ptr,
    weights_ptr,
    table_ptr,
    sinks_ptr,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    table_row,
    page_rows,
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
    ONE_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A persistent program: units (item, key head) pid, pid + programs, ... ONE_BLOCK: an item is usually one block of keys, and its old
    ones are read before the queries are there (the cache was written by earlier steps, the list by an earlier kernel that ran to its end).
    """
    if PDL:
        gdc_launch_dependents()
        if not ONE_BLOCK:
            gdc_wait()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    ROWS: tl.constexpr = QUERIES * GROUP
    factor = 1.0 if HAS_SOFTCAP else scale * LOG2E
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        item = items_ptr + unit // NUM_KV * 8
        head = unit % NUM_KV
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
        m_ok = (m < ROWS)[:, None] & (dim < D)[None, :]
        q_place = (row.to(tl.int64) * QUERIES + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None] * q_head + dim[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        begin = start // BLOCK_S * BLOCK_S
        if ONE_BLOCK:
            key = begin + tl.arange(0, BLOCK_S)
            old = (key >= start) & (key < tl.minimum(end, computed))
            new = (key >= start) & (key < end) & (key >= computed)
            page = pages_of(table, key, (key >= start) & (key < end), PAGE)
            place = token_offsets(page, key, page_rows, PAGE, TOKEN)
            k = tl.load(k_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            v = tl.load(v_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            if PDL:
                gdc_wait()
            q = tl.load(q_ptr + q_place, mask=m_ok, other=0.0)
            k = tl.where(old[:, None], k, tl.load(k_base + place, mask=new[:, None] & (dim < D)[None, :], other=0.0)).to(q.dtype)
            v = tl.where(old[:, None], v, tl.load(v_base + place, mask=new[:, None] & (dim < D)[None, :], other=0.0)).to(q.dtype)
            scores = scores_of(q, k, key, position, start, end, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW)
            acc, largest, total = fold(acc, largest, total, scores, factor, v)
            begin += BLOCK_S
        else:
            q = tl.load(q_ptr + q_place, mask=m_ok, other=0.0)
        ahead = begin + tl.arange(0, BLOCK_S)
        page = pages_of(table, ahead, (ahead >= start) & (ahead < end), PAGE)
        for block in tl.range(begin, end, BLOCK_S):
            key = block + tl.arange(0, BLOCK_S)
            there = (key >= start) & (key < end) if HAS_WINDOW else key < end
            place = token_offsets(page, key, page_rows, PAGE, TOKEN)
            page = pages_of(table, key + BLOCK_S, key + BLOCK_S < end, PAGE)
            there = there[:, None] if D == BLOCK_D else there[:, None] & (dim < D)[None, :]
            k = tl.load(k_base + place, mask=there, other=0.0).to(q.dtype)
            v = tl.load(v_base + place, mask=there, other=0.0).to(q.dtype)
            scores = scores_of(q, k, key, position, start, end, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW)
            acc, largest, total = fold(acc, largest, total, scores, factor, v)

        if slot < 0:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
                acc, total = add_sink(acc, largest, total, sink)
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            head_out = (head * GROUP + m % GROUP)[:, None] * D + dim[None, :]
            token_out = (row.to(tl.int64) * QUERIES + query)[:, None] * (NUM_KV * GROUP * D)
            result = tl.where((query < query_len)[:, None], result, 0.0)
            tl.store(out_ptr + token_out + head_out, result.to(out_ptr.dtype.element_ty), mask=m_ok)
        else:
            mine = (slot.to(tl.int64) * NUM_KV + head) * ROWS + m
            tl.store(partial_ptr + mine[:, None] * D + dim[None, :], acc, mask=m_ok)
            tl.store(weights_ptr + mine * 2, largest, mask=m < ROWS)
            tl.store(weights_ptr + mine * 2 + 1, total, mask=m < ROWS)
            tl.debug_barrier()  # all threads' stores come before the one atomic
            arrived = tl.atomic_add(arrivals_ptr + row * NUM_KV + head, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                all_acc, all_largest, all_total = combine(
                    partial_ptr, weights_ptr, slot - split, splits, head, NUM_KV, ROWS, M_OUT, D, BLOCK_D, AT_ONCE
                )
                r = tl.arange(0, M_OUT)
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + head * GROUP + r % GROUP).to(tl.float32) * LOG2E
                    all_acc, all_total = add_sink(all_acc, all_largest, all_total, sink)
                result = all_acc / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
                result = tl.where((r // GROUP < query_len)[:, None], result, 0.0)
                token_out = (row.to(tl.int64) * QUERIES + r // GROUP)[:, None] * (NUM_KV * GROUP * D)
                head_out = (head * GROUP + r % GROUP)[:, None] * D + dim[None, :]
                r_ok = (r < ROWS)[:, None] & (dim < D)[None, :]
                tl.store(out_ptr + token_out + head_out, result.to(out_ptr.dtype.element_ty), mask=r_ok)
                tl.store(arrivals_ptr + row * NUM_KV + head, 0)  # for the next layer


def decode_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    work: AttentionWork,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of the tokens of the decode rows, into the first tokens of out. q: [T, H, D]. out: [T, H, D], contiguous."""
    decode = work.decode
    config, device = decode.config, q.device
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    block_dim, rows_out = max(16, next_power_of_2(dim)), next_power_of_2(decode.queries * group)
    programs = min(decode.items.shape[0] * num_kv, processors(device) * config.programs)
    decode_attention[(programs,)](
        q,
        cache,
        out,
        decode.items,
        decode.count,
        decode.arrivals,
        decode.partial,
        decode.weights,
        work.block_table,
        q if sinks is None else sinks,
        scale,
        softcap or 0.0,
        work.window or 0,
        q.stride(0),
        q.stride(1),
        work.block_table.stride(0),
        work.page_rows,
        NUM_KV=num_kv,
        GROUP=group,
        QUERIES=decode.queries,
        PAGE=cache.shape[1],
        D=dim,
        BLOCK_D=block_dim,
        BLOCK_M=max(16, rows_out),
        BLOCK_S=config.block_keys,
        M_OUT=rows_out,
        AT_ONCE=max(2, COMBINE_FLOATS // (rows_out * block_dim)),
        ONE_BLOCK=config.chunk == config.block_keys,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SINKS=sinks is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(device),
    )
