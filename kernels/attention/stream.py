"""Attention of many decode rows: a program's units in one loop, so that the keys of the next are on their way before this one ends.

Where programs have several units each, the kernel of `decode.py` lets them wait for memory at every unit's beginning, many at a time. Here
keys and values of a program's units are one sequence of blocks. Names and letters as in `decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.tile import LOG2E, LOWEST, fold, pages_of, threads_meet, token_offsets, wait_in_loop
from modelrunner.kernels.attention.unit import combine_row, scores_of, start_row, store_unit

UNITS = tl.constexpr(32)  # whose blocks are counted at a time


@triton.jit
def own_unit(n):
    """The program's n-th unit. Dealt out to and fro, which evens out the sums of units that are sorted by falling length."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    return n * programs + tl.where(n % 2 == 0, pid, programs - 1 - pid)


@triton.jit
def keys_of(items_ptr, unit, there, NUM_KV: tl.constexpr, FUSED: tl.constexpr):
    """Row, first and end key of units in the cache, as the kernel starts if FUSED. 0 where none is there."""
    item = items_ptr + unit // NUM_KV * 8
    row = tl.load(item, mask=there, other=0)
    start = tl.load(item + 1, mask=there, other=0)
    end = tl.load(item + 2, mask=there, other=0)
    if FUSED:
        end = tl.minimum(end, tl.load(item + 3, mask=there, other=0) - tl.load(item + 4, mask=there, other=0))
    return row, start, end


@triton.jit
def count_blocks(items_ptr, units, NUM_KV: tl.constexpr, BLOCK_S: tl.constexpr, FUSED: tl.constexpr):
    """Blocks of all units of the program; each has at least one."""
    programs = tl.num_programs(0)
    blocks = 0
    for first in range(0, tl.cdiv(units, programs), UNITS):
        unit = own_unit(first + tl.arange(0, UNITS))
        there = unit < units
        _, start, end = keys_of(items_ptr, unit, there, NUM_KV, FUSED)
        blocks += tl.sum(tl.where(there, tl.maximum(tl.cdiv(end - start // BLOCK_S * BLOCK_S, BLOCK_S), 1), 0), 0)
    return blocks


@triton.jit
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
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    slots_ptr,
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
    GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments as in `decode_attention`; HOLD means nothing here. GPU: False in the interpreter.

    Partial results are told of and combined as units end. Doing that after the loop, so that no atomic is in it, is slower: what is left to
    combine then has no loads beside it.
    """
    if PDL:
        gdc_launch_dependents()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    ROWS: tl.constexpr = QUERIES * GROUP
    FUSED: tl.constexpr = R > 0
    factor = 1.0 if HAS_SOFTCAP else scale * LOG2E
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    blocks = count_blocks(items_ptr, units, NUM_KV, BLOCK_S, FUSED)
    n = 0
    row, start, end = keys_of(items_ptr, own_unit(n), own_unit(n) < units, NUM_KV, FUSED)
    next_row, next_start, next_end = keys_of(items_ptr, own_unit(n + 1), own_unit(n + 1) < units, NUM_KV, FUSED)
    block = start // BLOCK_S * BLOCK_S
    key = block + tl.arange(0, BLOCK_S)
    page = pages_of(table_ptr + row.to(tl.int64) * table_row, key, (key >= start) & (key < end), PAGE)
    q = tl.zeros([BLOCK_M, BLOCK_D], q_ptr.dtype.element_ty)
    position = tl.zeros([BLOCK_M], tl.int32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if not FUSED:  # noqa: SIM102 - what this step computed is among the keys
        if PDL:
            gdc_wait()
    for _ in tl.range(blocks):
        head = own_unit(n) % NUM_KV
        if block <= start:
            item = items_ptr + own_unit(n) // NUM_KV * 8
            seq_len = tl.load(item + 3)
            query_len = tl.load(item + 4)
            first_token = row.to(tl.int64) * QUERIES
            position = tl.where(query < query_len, seq_len - query_len + query, seq_len - 1)
            if FUSED:
                if PDL:  # noqa: SIM102 - known when compiled
                    if n == 0:
                        wait_in_loop()
                q, acc, largest, total = start_row(
                    q_ptr, cache_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slots_ptr, first_token, head, tl.load(item + 6),
                    tl.load(item + 7), query_len, scale, softcap, eps, q_token, q_head, page_rows, cos_sin_token,
                    PAGE, NUM_KV, GROUP, D, BLOCK_D, BLOCK_M, R, HAS_NORM, HAS_SOFTCAP,
                )  # fmt: skip
            else:
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
        scores = scores_of(q, k, key, position, start, end, scale, softcap, window, QUERIES == 1, HAS_SOFTCAP, HAS_WINDOW)
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
        next_row, next_start, next_end = keys_of(items_ptr, next_unit, next_unit < units, NUM_KV, FUSED)
