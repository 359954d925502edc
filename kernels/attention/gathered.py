"""Attention of long prompts over keys and values in contiguous memory, which the tensor memory accelerator brings in blocks.

A layer's keys and values are first copied out of their pages (`gather.py`): one pass over memory, against addresses and registers saved in
each of the many reads. Tiles and letters as in `prefill.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from modelrunner.kernels.attention.device import launch_options, processors
from modelrunner.kernels.attention.gather import gather_pages
from modelrunner.kernels.attention.scaled import head_scales
from modelrunner.kernels.attention.tile import LOG2E, LOWEST, add_sink, capped, fold, matmul
from modelrunner.kernels.attention.work_list import AttentionWork


@triton.jit
def fold_blocks(
    acc, largest, total, q, position, k_desc, v_desc, start, column, begin, end, scale, softcap,
    BLOCK_S: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of keys that start in [begin, end). MASKED: not every query sees every key. Keys after a row's last are zeros."""
    factor = 1.0 if HAS_SOFTCAP else scale * LOG2E
    for block in tl.range(begin, end, BLOCK_S):
        k = k_desc.load([start + block, column])
        v = v_desc.load([start + block, column])
        scores = matmul(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_S], tl.float32))
        if HAS_SOFTCAP:
            scores = capped(scores, scale, softcap)
        if MASKED:
            key = block + tl.arange(0, BLOCK_S)
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        acc, largest, total = fold(acc, largest, total, scores, factor, v)
    return acc, largest, total


@triton.jit
def gathered_attention(
    q_ptr, k_desc, v_desc, out_ptr, tiles_ptr, count_ptr, starts_ptr, sinks_ptr, scales_ptr, scale, softcap, q_token, q_head,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A persistent program, as `prefill_attention`. starts_ptr: where the keys of rows begin."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid, programs = tl.program_id(0), tl.num_programs(0)
    units = tl.load(count_ptr) * NUM_KV
    dim = tl.arange(0, D)[None, :]
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
            start = tl.load(starts_ptr + row)
            key_scale, _, v_scale = head_scales(scales_ptr, head, scale, NUM_KV, HAS_SCALES)
            first_position = seq_len - query_len + first_query
            heads = (head * GROUP + m % GROUP)[:, None]
            q_ok = ((query < live) & (query < TILE))[:, None]
            q = tl.load(q_ptr + (token + query)[:, None] * q_token + heads * q_head + dim, mask=q_ok, other=0.0)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            largest = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            # Keys before `last` are seen by some query, blocks before `full_end` wholly by all.
            last = tl.where(live > 0, first_position + live, 0)
            full_end = tl.where(live > 0, (first_position + 1) // BLOCK_S * BLOCK_S, 0)
            acc, largest, total = fold_blocks(
                acc, largest, total, q, first_position + query, k_desc, v_desc, start, head * D, 0, full_end, key_scale, softcap,
                BLOCK_S, HAS_SOFTCAP, False,
            )  # fmt: skip
            acc, largest, total = fold_blocks(
                acc, largest, total, q, first_position + query, k_desc, v_desc, start, head * D, full_end, last, key_scale, softcap,
                BLOCK_S, HAS_SOFTCAP, True,
            )  # fmt: skip
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
                acc, total = add_sink(acc, largest, total, sink)
            result = acc / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
            result = tl.where((query < live)[:, None], result, 0.0)
            out_ok = ((query < tokens) & (query < TILE))[:, None]
            out = out_ptr + (token + query)[:, None] * (NUM_KV * GROUP * D) + heads * D + dim
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=out_ok)


def gathered_rows(
    q: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    work: AttentionWork,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> None:
    """`prefill_rows` of work whose keys are gathered first. q: [T, H, D], in the type that the keys become. out: [T, H, D], contiguous."""
    prefill = work.prefill
    assert prefill is not None
    keys, config, device = prefill.keys, prefill.config, q.device
    assert keys is not None
    num_kv, dim, group = work.num_kv_heads, q.shape[2], q.shape[1] // work.num_kv_heads
    kv = torch.empty((keys.num_tokens, 2, num_kv, dim), dtype=q.dtype, device=device)
    first = keys.first_row
    gather_pages(cache, work.block_table[first:], keys.starts[first:], keys.lengths[first:], kv, max_tokens=keys.max_tokens)
    shape, strides, block = [keys.num_tokens, num_kv * dim], [2 * num_kv * dim, 1], [config.block_keys, dim]
    descriptors = [TensorDescriptor(kv[:, i], shape, strides, block) for i in range(2)]
    programs = min(prefill.tiles.shape[0] * num_kv, processors(device) * config.programs)
    gathered_attention[(programs,)](
        q,
        *descriptors,
        out,
        prefill.tiles,
        prefill.count,
        keys.starts,
        q if sinks is None else sinks,
        q if scales is None else scales,
        scale,
        softcap or 0.0,
        q.stride(0),
        q.stride(1),
        NUM_KV=num_kv,
        GROUP=group,
        TILE=prefill.tile_query,
        D=dim,
        BLOCK_M=config.block_queries,
        BLOCK_S=config.block_keys,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=scales is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(device),
    )
