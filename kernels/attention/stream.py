"""Attention of many decode rows: a program's units in one loop, so that the keys of the next are on their way before this one ends.

Where programs have a few units each, the kernel of `decode.py` lets them wait for memory at every unit's beginning, many at a time. Here
keys and values of a program's units are one sequence of blocks. Names and letters as in `decode.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.decode import combine, combined_at_once
from modelrunner.kernels.attention.device import launch_options, next_power_of_2, processors
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, fold, matmul, pages_of, threads_meet, token_offsets
from modelrunner.kernels.attention.work_list import AttentionWork

UNITS = tl.constexpr(32)  # whose blocks are counted at a time


@triton.jit
def own_unit(n):
    """The program's n-th unit. Dealt out to and fro, which evens out the sums of units that are sorted by falling length."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    return n * programs + tl.where(n % 2 == 0, pid, programs - 1 - pid)


@triton.jit
def keys_of(items_ptr, unit, there, NUM_KV: tl.constexpr):
    """Row, first and end key of units. 0 where none is there."""
    item = items_ptr + unit // NUM_KV * 8
    row = tl.load(item, mask=there, other=0)
    return row, tl.load(item + 1, mask=there, other=0), tl.load(item + 2, mask=there, other=0)


@triton.jit
def count_blocks(items_ptr, units, NUM_KV: tl.constexpr, BLOCK_S: tl.constexpr):
    """Blocks of all units of the program; each has at least one."""
    programs = tl.num_programs(0)
    blocks = 0
    for first in range(0, tl.cdiv(units, programs), UNITS):
        unit = own_unit(first + tl.arange(0, UNITS))
        there = unit < units
        _, start, end = keys_of(items_ptr, unit, there, NUM_KV)
        blocks += tl.sum(tl.where(there, tl.maximum(tl.cdiv(end - start // BLOCK_S * BLOCK_S, BLOCK_S), 1), 0), 0)
    return blocks


@triton.jit
def visible_scores(
    q, k, key, position, first, end, scale, softcap, window, ONE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Masked scores [M, S], scaled only if they are capped. ONE: a row has one query, which sees all keys of [first, end)."""
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


@triton.jit(do_not_specialize=["table_row"])  # pages of a step that is not captured are of any number
def decode_stream(
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """A persistent program: units of the list, see `own_unit`. GPU: False in the interpreter.

    Partial results are told of and combined as units end. Doing that after the loop, so that no atomic is in it, is slower: what is left to
    combine then has no loads beside it.
    """
    if PDL:
        gdc_launch_dependents()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    ROWS: tl.constexpr = QUERIES * GROUP
    factor = 1.0 if HAS_SOFTCAP else scale * LOG2E
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    blocks = count_blocks(items_ptr, units, NUM_KV, BLOCK_S)
    n = 0
    row, start, end = keys_of(items_ptr, own_unit(n), own_unit(n) < units, NUM_KV)
    next_row, next_start, next_end = keys_of(items_ptr, own_unit(n + 1), own_unit(n + 1) < units, NUM_KV)
    block = start // BLOCK_S * BLOCK_S
    key = block + tl.arange(0, BLOCK_S)
    page = pages_of(table_ptr + row.to(tl.int64) * table_row, key, (key >= start) & (key < end), PAGE)
    q = tl.zeros([BLOCK_M, BLOCK_D], q_ptr.dtype.element_ty)
    position = tl.zeros([BLOCK_M], tl.int32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if PDL:  # what this step computed is among the keys
        gdc_wait()
    for _ in tl.range(blocks):
        head = own_unit(n) % NUM_KV
        if block <= start:
            item = items_ptr + own_unit(n) // NUM_KV * 8
            seq_len = tl.load(item + 3)
            query_len = tl.load(item + 4)
            first_token = row.to(tl.int64) * QUERIES
            position = tl.where(query < query_len, seq_len - query_len + query, seq_len - 1)
            q_at = q_ptr + (first_token + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None] * q_head
            q = tl.load(q_at + dim[None, :], mask=(m < ROWS)[:, None] & (dim < D)[None, :], other=0.0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            largest = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
        key = block + tl.arange(0, BLOCK_S)
        there = (key >= start) & (key < end) if HAS_WINDOW else key < end
        there = there[:, None] if D == BLOCK_D else there[:, None] & (dim < D)[None, :]
        place = head * D + token_offsets(page, key, page_rows, PAGE, TOKEN) + dim[None, :]
        k = tl.load(cache_ptr + place, mask=there, other=0.0).to(q.dtype)
        v = tl.load(cache_ptr + NUM_KV * D + place, mask=there, other=0.0).to(q.dtype)
        scores = visible_scores(q, k, key, position, start, end, scale, softcap, window, QUERIES == 1, HAS_SOFTCAP, HAS_WINDOW)
        acc, largest, total = fold(acc, largest, total, scores, factor, v)

        last = block + BLOCK_S >= end
        if last:
            item = items_ptr + own_unit(n) // NUM_KV * 8
            query_len = tl.load(item + 4)
            slot = tl.load(item + 5)
            split = tl.load(item + 6)
            splits = tl.load(item + 7)
            store_unit(
                acc, largest, total, row, query_len, slot, head, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
                NUM_KV, GROUP, ROWS, D, BLOCK_M, BLOCK_D, HAS_SINKS,
            )  # fmt: skip
            if slot >= 0:
                threads_meet(GPU)  # all threads' stores come before the one atomic
                arrived = tl.atomic_add(arrivals_ptr + row * NUM_KV + head, 1, sem="acq_rel", scope="gpu")
                if arrived == splits - 1:
                    combine_row(
                        row, query_len, slot - split, splits, head, out_ptr, arrivals_ptr, partial_ptr, lse_ptr, sinks_ptr,
                        NUM_KV, GROUP, ROWS, D, BLOCK_D, M_OUT, AT_ONCE, HAS_SINKS,
                    )  # fmt: skip
        row = tl.where(last, next_row, row)
        start = tl.where(last, next_start, start)
        end = tl.where(last, next_end, end)
        block = tl.where(last, next_start // BLOCK_S * BLOCK_S, block + BLOCK_S)
        n += last.to(tl.int32)
        key = block + tl.arange(0, BLOCK_S)
        page = pages_of(table_ptr + row.to(tl.int64) * table_row, key, (key >= start) & (key < end), PAGE)
        next_unit = own_unit(n + 1)
        next_row, next_start, next_end = keys_of(items_ptr, next_unit, next_unit < units, NUM_KV)


def stream_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    work: AttentionWork,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """`decode_rows` of rotated queries [T, H, D] and a cache without scales."""
    decode = work.decode
    config, device = decode.config, q.device
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    block_dim, rows_out = max(16, next_power_of_2(dim)), next_power_of_2(decode.queries * group)
    programs = min(decode.items.shape[0] * num_kv, processors(device) * config.programs)
    decode_stream[(programs,)](
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
        AT_ONCE=combined_at_once(rows_out, block_dim),
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SINKS=sinks is not None,
        GPU=device.type == "cuda",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(device),
    )
