"""Attention of rows with many query tokens (FlashAttention-2, Dao 2023, arXiv:2307.08691), keys and values gathered from pages.

A tile is up to TILE consecutive query tokens of a row times the G query heads that share a key head. Blocks of keys that all of its queries
see are not masked. Letters as in `work_list.py`; M rows of a product (TILE * G, padded), S keys at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.device import launch_options, next_power_of_2, processors
from modelrunner.kernels.attention.parts import add_up
from modelrunner.kernels.attention.scaled import HALF_QUERY, factors, head_scales, in_half
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, fold, matmul, pages_of, token_offsets
from modelrunner.kernels.attention.work_list import AttentionWork


@triton.jit
def fold_keys(
    acc, largest, total, q, position, k_base, v_base, table, begin, end, first, last, scale, softcap, window, page_rows,
    PAGE: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of keys that start in [begin, end). MASKED: not every query sees every key, and keys outside [first, last) must
    not be read."""
    dim = tl.arange(0, BLOCK_D)
    factor = 1.0 if HAS_SOFTCAP else scale * LOG2E
    ahead = begin + tl.arange(0, BLOCK_S)
    page = pages_of(table, ahead, (ahead >= first) & (ahead < last), PAGE)
    for block in tl.range(begin, end, BLOCK_S):
        key = block + tl.arange(0, BLOCK_S)
        place = token_offsets(page, key, page_rows, PAGE, TOKEN)
        page = pages_of(table, key + BLOCK_S, key + BLOCK_S < last, PAGE)
        if MASKED:
            mask = ((key >= first) & (key < last))[:, None] & (dim < D)[None, :]
            k = tl.load(k_base + place, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(v_base + place, mask=mask, other=0.0).to(q.dtype)
        else:
            if D == BLOCK_D:
                k = tl.load(k_base + place).to(q.dtype)
                v = tl.load(v_base + place).to(q.dtype)
            else:
                k = tl.load(k_base + place, mask=(dim < D)[None, :], other=0.0).to(q.dtype)
                v = tl.load(v_base + place, mask=(dim < D)[None, :], other=0.0).to(q.dtype)
        scores = matmul(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_S], tl.float32))
        if HAS_SOFTCAP:
            scores = capped(scores, scale, softcap)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                visible &= key[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        acc, largest, total = fold(acc, largest, total, scores, factor, v)
    return acc, largest, total


@triton.jit(do_not_specialize=["table_row"])  # pages of a step that is not captured are of any number
def prefill_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    tiles_ptr,
    count_ptr,
    table_ptr,
    sinks_ptr,
    scales_ptr,
    outputs_ptr,
    sums_ptr,
    arrivals_ptr,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    table_row,
    page_rows,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IN_HALF: tl.constexpr,
    PARTS: tl.constexpr,
    GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """A persistent program. Units (tile, key head) are sorted by falling length; dealt out to and fro, which evens out the sums.

    PARTS: tiles may be parts of tiles, see `parts.py`. GPU: False in the interpreter.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    TOKEN: tl.constexpr = 2 * NUM_KV * D
    pid, programs = tl.program_id(0), tl.num_programs(0)
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    for turn in range(tl.cdiv(units, programs)):
        unit = turn * programs + tl.where(turn % 2 == 0, pid, programs - 1 - pid)
        if unit < units:
            tile = tiles_ptr + unit // NUM_KV * 8
            head = unit % NUM_KV
            row = tl.load(tile)
            first_query = tl.load(tile + 1)
            query_len = tl.load(tile + 2)
            seq_len = tl.load(tile + 3)
            token = tl.load(tile + 4).to(tl.int64)
            tokens = tl.load(tile + 5)
            live = tl.minimum(query_len - first_query, TILE)  # 0 or less: tokens that only want a finite output
            table = table_ptr + row.to(tl.int64) * table_row
            k_base = cache_ptr + head * D + dim[None, :]
            v_base = k_base + NUM_KV * D
            key_scale, _, v_scale = head_scales(scales_ptr, head, scale, NUM_KV, HAS_SCALES)
            key_scale = key_scale / HALF_QUERY if IN_HALF else key_scale
            first_position = seq_len - query_len + first_query
            position = first_position + query
            heads = (head * GROUP + m % GROUP)[:, None]
            q_ok = ((query < live) & (query < TILE))[:, None] & (dim < D)[None, :]
            q = tl.load(q_ptr + (token + query)[:, None] * q_token + heads * q_head + dim[None, :], mask=q_ok, other=0.0)
            q = factors(q, IN_HALF)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            largest = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)

            # Keys [first, last) are seen by some query, blocks in [full_begin, full_end) wholly by all.
            last = tl.where(live > 0, first_position + live, 0)
            first = 0
            full_begin = 0
            if HAS_WINDOW:
                first = tl.maximum(first_position - (window - 1), 0)
                full_begin = tl.cdiv(tl.maximum(last - window, 0), BLOCK_S) * BLOCK_S
                begin = first // BLOCK_S * BLOCK_S
                acc, largest, total = fold_keys(
                    acc, largest, total, q, position, k_base, v_base, table, begin, tl.minimum(full_begin, last), first, last,
                    key_scale, softcap, window, page_rows, PAGE, TOKEN, D, BLOCK_D, BLOCK_S, HAS_SOFTCAP, HAS_WINDOW, True,
                )  # fmt: skip
            full_end = tl.where(live > 0, tl.maximum((first_position + 1) // BLOCK_S * BLOCK_S, full_begin), last)
            parts = 1
            if PARTS:
                word = tl.load(tile + 7)
                parts = word % 16
                part_keys = tl.cdiv(tl.cdiv(last, parts), BLOCK_S) * BLOCK_S
                full_begin = tl.minimum(word // 16 % 16 * part_keys, last)
                last = tl.minimum(full_begin + part_keys, last)
                full_end = tl.maximum(tl.minimum(full_end, last // BLOCK_S * BLOCK_S), full_begin)
            acc, largest, total = fold_keys(
                acc, largest, total, q, position, k_base, v_base, table, full_begin, full_end, first, last,
                key_scale, softcap, window, page_rows, PAGE, TOKEN, D, BLOCK_D, BLOCK_S, HAS_SOFTCAP, HAS_WINDOW, False,
            )  # fmt: skip
            acc, largest, total = fold_keys(
                acc, largest, total, q, position, k_base, v_base, table, full_end, last, first, last,
                key_scale, softcap, window, page_rows, PAGE, TOKEN, D, BLOCK_D, BLOCK_S, HAS_SOFTCAP, HAS_WINDOW, True,
            )  # fmt: skip

            whole = True
            if PARTS:  # noqa: SIM102  one is of the build, one of the tile
                if parts > 1:
                    acc, largest, total, whole = add_up(
                        acc, largest, total, word // 256, word // 16 % 16, parts, head, outputs_ptr, sums_ptr, arrivals_ptr,
                        NUM_KV, BLOCK_M, BLOCK_D, GPU,
                    )  # fmt: skip
            if whole:
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
                    acc, total = add_sink(acc, largest, total, sink)
                result = acc / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
                result = tl.where((query < live)[:, None], result, 0.0)
                out_ok = ((query < tokens) & (query < TILE))[:, None] & (dim < D)[None, :]
                out = out_ptr + (token + query)[:, None] * (NUM_KV * GROUP * D) + heads * D + dim[None, :]
                tl.store(out, result.to(out_ptr.dtype.element_ty), mask=out_ok)


def prefill_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    work: AttentionWork,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    **options: bool,
) -> None:
    """Attention of the tokens after those of the decode rows, into the same tokens of out. q: [T, H, D]. out: [T, H, D], contiguous.

    options: the compiler's.
    """
    prefill = work.prefill
    assert prefill is not None
    config, device = prefill.config, q.device
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    parts = prefill.parts
    programs = min(prefill.tiles.shape[0] * num_kv, processors(device) * config.programs)
    prefill_attention[(programs,)](
        q,
        cache,
        out,
        prefill.tiles,
        prefill.count,
        work.block_table,
        q if sinks is None else sinks,
        q if scales is None else scales,
        q if parts is None else parts.outputs,
        q if parts is None else parts.sums,
        prefill.count if parts is None else parts.arrivals,
        scale,
        softcap or 0.0,
        work.window or 0,
        q.stride(0),
        q.stride(1),
        work.block_table.stride(0),
        work.page_rows,
        NUM_KV=num_kv,
        GROUP=group,
        TILE=prefill.tile_query,
        PAGE=cache.shape[1],
        D=dim,
        BLOCK_D=max(16, next_power_of_2(dim)),
        BLOCK_M=max(config.block_queries, next_power_of_2(group)),
        BLOCK_S=config.block_keys,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=work.window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None,
        IN_HALF=in_half(q, cache),
        PARTS=parts is not None,
        GPU=device.type == "cuda",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(device),
        **options,
    )
