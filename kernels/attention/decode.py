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
from modelrunner.kernels.attention.heads import rotated, turn_factors
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, combine, fold, matmul, pages_of, token_offsets
from modelrunner.kernels.attention.work_list import AttentionWork

COMBINE_FLOATS = 8192  # of partial results that a program looks at together
Rotary = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, float]  # q_norm, k_norm, cos_sin, eps


@triton.jit
def scores_of(
    q, k, key, position, first, end, scale, softcap, window, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr
):
    """Masked scores [M, S], scaled only if they are capped. q: [M, D]. k: [S, D]. key: [S]. position: [M].

    Keys outside [first, end) are not there. CAUSAL: some are past a query.
    """
    scores = matmul(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if HAS_SOFTCAP:
        scores = capped(scores, scale, softcap)
    visible = key[None, :] < end
    if CAUSAL:
        visible &= key[None, :] <= position[:, None]
    if HAS_WINDOW:
        visible &= (key[None, :] > position[:, None] - window) & (key[None, :] >= first)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def fold_new(
    acc, largest, total, q, query, row, head, query_len, qkv_ptr, qkv_token, cache_ptr, slots_ptr, k_norm_ptr, cos_sin_ptr, cos_sin_token,
    eps, scale, softcap, window, page_rows,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a row's new keys, one at a time, write them and their values to the cache, and attend to them."""
    dim = tl.arange(0, BLOCK_D)[None, :]
    for j in range(QUERIES):
        token = row.to(tl.int64) * QUERIES + j
        at = token * qkv_token + (NUM_KV * GROUP + head) * D
        cos, sin = turn_factors(cos_sin_ptr, token + tl.zeros([1, 1], tl.int64), cos_sin_token, dim, R)
        k = rotated(qkv_ptr, at + tl.zeros([1, 1], tl.int64), dim < D, dim, k_norm_ptr, cos, sin, eps, D, R, HAS_NORM)
        k = k.to(cache_ptr.dtype.element_ty)
        v = tl.load(qkv_ptr + at + NUM_KV * D + dim, mask=dim < D, other=0.0).to(cache_ptr.dtype.element_ty)
        slot = tl.load(slots_ptr + token)
        place = cache_ptr + (slot // PAGE * page_rows + slot % PAGE) * (2 * NUM_KV * D) + head * D + dim
        written = (dim < D) & (slot + tl.zeros([1, 1], tl.int64) >= 0)
        tl.store(place, k, mask=written)
        tl.store(place + NUM_KV * D, v, mask=written)
        scores = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32), 1)
        scores = capped(scores, scale, softcap) if HAS_SOFTCAP else scores * (scale * LOG2E)
        visible = (query >= j) & (query_len > j)
        if HAS_WINDOW:
            visible &= query - window < j
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(largest, scores)
        shrink, weight = tl.exp2(largest - new), tl.exp2(scores - new)
        acc = acc * shrink[:, None] + weight[:, None] * v.to(q.dtype).to(tl.float32)
        total = total * shrink + weight
        largest = new
    return acc, largest, total


@triton.jit
def prefetch_keys(
    cache_ptr, table_ptr, items_ptr, count_ptr, table_row, page_rows,
    NUM_KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, TOKEN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Ask for the first keys and values of a program's first unit, into the second-level cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    unit = tl.program_id(0)
    if unit < tl.load(count_ptr) * NUM_KV:
        item = items_ptr + unit // NUM_KV * 8
        table = table_ptr + tl.load(item).to(tl.int64) * table_row
        key = tl.minimum(tl.load(item + 1) + tl.arange(0, KEYS), tl.maximum(tl.load(item + 2) - 1, 0))
        page = tl.load(table + key // PAGE)
        place = cache_ptr + (page.to(tl.int64) * page_rows + key % PAGE) * TOKEN + unit % NUM_KV * D
        for i in tl.static_range(2 * LINES):
            address = (place + (i // LINES * (NUM_KV * D) + i % LINES * LINE)).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


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
    ONE_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    FUSED: tl.constexpr,
    R: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A persistent program: units (item, key head) pid, pid + programs, ... ONE_BLOCK: an item is usually one block of keys, and its old
    ones are read before the queries are there (the cache was written by earlier steps, the list by an earlier kernel that ran to its end).

    FUSED: q is the projection's output; this kernel norms and rotates it, and writes the new keys and values, which it does not read back.
    """
    if PDL:
        gdc_launch_dependents()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    if PDL and not ONE_BLOCK:
        if PREFETCH > 0:
            prefetch_keys(cache_ptr, table_ptr, items_ptr, count_ptr, table_row, page_rows, NUM_KV, PAGE, D, TOKEN, PREFETCH)
        gdc_wait()
    ROWS: tl.constexpr = QUERIES * GROUP
    CAUSAL: tl.constexpr = QUERIES > 1 and not FUSED
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
        if FUSED:
            end = tl.minimum(end, computed)
        m_ok = (m < ROWS)[:, None] & (dim < D)[None, :]
        q_at = (row.to(tl.int64) * QUERIES + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None] * q_head
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

        begin = start // BLOCK_S * BLOCK_S
        if ONE_BLOCK:
            key = begin + tl.arange(0, BLOCK_S)
            inside = (key >= start) & (key < end)
            old = inside & (key < computed)
            page = pages_of(table, key, inside, PAGE)
            place = token_offsets(page, key, page_rows, PAGE, TOKEN)
            k = tl.load(k_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            v = tl.load(v_base + place, mask=old[:, None] & (dim < D)[None, :], other=0.0)
            if PDL:
                gdc_wait()
        if FUSED:
            token = row.to(tl.int64) * QUERIES + (query[:, None] if QUERIES > 1 else tl.zeros([1, 1], tl.int32))
            cos, sin = turn_factors(cos_sin_ptr, token, cos_sin_token, dim[None, :], R)
            q = rotated(q_ptr, q_at, m_ok, dim[None, :], q_norm_ptr, cos, sin, eps, D, R, HAS_NORM)
            if split == splits - 1:
                acc, largest, total = fold_new(
                    acc, largest, total, q, query, row, head, query_len, q_ptr, q_token, cache_ptr, slots_ptr, k_norm_ptr, cos_sin_ptr,
                    cos_sin_token, eps, scale, softcap, window, page_rows,
                    NUM_KV, GROUP, QUERIES, PAGE, D, BLOCK_D, R, HAS_NORM, HAS_SOFTCAP, HAS_WINDOW,
                )  # fmt: skip
        else:
            q = tl.load(q_ptr + q_at + dim[None, :], mask=m_ok, other=0.0)
        if ONE_BLOCK:
            if not FUSED:
                new = inside[:, None] & (key >= computed)[:, None] & (dim < D)[None, :]
                k = tl.where(old[:, None], k, tl.load(k_base + place, mask=new, other=0.0))
                v = tl.where(old[:, None], v, tl.load(v_base + place, mask=new, other=0.0))
            k, v = k.to(q.dtype), v.to(q.dtype)
            scores = scores_of(q, k, key, position, start, end, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW, CAUSAL)
            acc, largest, total = fold(acc, largest, total, scores, factor, v)
            begin += BLOCK_S
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
            scores = scores_of(q, k, key, position, start, end, scale, softcap, window, HAS_SOFTCAP, HAS_WINDOW, CAUSAL)
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
    rotary: Rotary | None = None,
) -> None:
    """Attention of the tokens of the decode rows, into the first tokens of out: [T, H, D], contiguous.

    q: [T, H, D]. With rotary, q is a view [T, H, D] of the projection's output, which its keys and values follow; they are written.
    """
    decode = work.decode
    assert decode is not None
    config, device = decode.config, q.device
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    block_dim, rows_out = max(16, next_power_of_2(dim)), next_power_of_2(decode.queries * group)
    programs = min(decode.items.shape[0] * num_kv, processors(device) * config.programs)
    options = launch_options(device)
    if config.max_registers:
        options = options | {"maxnreg": config.max_registers}
    q_norm, k_norm, cos_sin, eps = (None, None, None, 0.0) if rotary is None else rotary
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
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q if cos_sin is None else cos_sin,
        work.slots,
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
        AT_ONCE=max(2, COMBINE_FLOATS // (rows_out * block_dim)),
        ONE_BLOCK=config.chunk == config.block_keys,
        PREFETCH=config.prefetch,
        FUSED=rotary is not None,
        R=0 if cos_sin is None else cos_sin.shape[1],
        HAS_NORM=q_norm is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SINKS=sinks is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
