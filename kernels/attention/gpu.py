"""Attention on NVIDIA GPUs: the operations that the Triton kernels replace, and the configurations to build ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from modelrunner.kernels.attention.deal import AT_ONCE, CUT_PAGES, FIRST_PAGES, LEAST_PAGES, deal_pages
from modelrunner.kernels.attention.decode import combined_at_once, decode_attention, decode_rows
from modelrunner.kernels.attention.device import next_power_of_2
from modelrunner.kernels.attention.fixed import fixed_config, fixed_index, fixed_indexed_attention, fixed_paged_attention
from modelrunner.kernels.attention.gather import BLOCK, copy_pages, gather_pages
from modelrunner.kernels.attention.gathered import gathered_attention, gathered_rows
from modelrunner.kernels.attention.parts import MOST_PARTS
from modelrunner.kernels.attention.prefill import prefill_attention, prefill_rows
from modelrunner.kernels.attention.prefill_list import (
    PART_KEYS,
    PrefillConfig,
    choose_prefill,
    gathered_config,
    prefill_tiles,
    sort_tiles,
)
from modelrunner.kernels.attention.ring_rows import HALF, RINGS, ring_config, ring_rows
from modelrunner.kernels.attention.rope_write import norm_rotate_write, qkv_rope_write
from modelrunner.kernels.attention.scaled import FLOAT8_SINCE
from modelrunner.kernels.attention.segments import packed_segment_attention
from modelrunner.kernels.attention.stream import decode_stream, stream_rows
from modelrunner.kernels.attention.work_list import (
    AttentionWork,
    DecodeList,
    attention_index,
    choose_decode,
    decode_items,
)
from modelrunner.kernels.attention.write import indexed_write, write_cache
from modelrunner.kernels.builds import CAPABILITIES, Build
from modelrunner.kernels.room import roomy

# One launch does all for rows of several tokens: up to so many each, in all, and times the heads of a group.
FUSED_QUERIES, FUSED_TOKENS, FUSED_HEADS = 4, 16, 8


def indexed_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: AttentionWork,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.reference.indexed_attention`. Invalid tokens get zeros."""
    if q.stride(2) != 1:
        q = q.contiguous()
    out = roomy(q.shape, q.dtype, q.device)
    if index.decode.config.stream and scales is None:
        stream_rows(q, cache, out, index, scale, softcap, sinks)
    else:
        decode_rows(q, cache, out, index, scale, softcap, sinks, None, scales)
    if index.prefill is not None:
        rows = prefill_rows if index.prefill.keys is None else gathered_rows
        rows(q, cache, out, index, scale, softcap, sinks, scales)
    return out


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
    token_row: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_decode: int,
    decode_query: int,
    max_query: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.reference.paged_attention`: the index and the attention."""
    index = attention_index(
        cache,
        block_table,
        query_start,
        query_len,
        seq_len,
        token_row,
        positions,
        num_heads=q.shape[1],
        num_decode=num_decode,
        decode_query=decode_query,
        max_query=max_query,
        max_seq_len=max_seq_len,
        window=window,
        dtype=q.dtype,
    )
    return indexed_attention(q, cache, index, scale=scale, softcap=softcap, sinks=sinks, scales=scales)


def _many(decode: DecodeList, group: int) -> bool:
    """Whether rows of several tokens have too many for one launch to gain."""
    several = decode.queries > 1
    return several and (
        decode.queries > FUSED_QUERIES or decode.rows * decode.queries > FUSED_TOKENS or decode.queries * group > FUSED_HEADS
    )


def qkv_attention(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    index: AttentionWork,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The fusion of that name: one launch for decode rows by rings and for few of few tokens each, else two. slots: those of the index."""
    decode = index.decode
    if index.rings is not None and softcap is None and sinks is None and scales is None and cos_sin.shape[1] == cache.shape[4]:
        if qkv.stride(1) != 1 or cos_sin.stride(1) != 1:
            qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
        out = roomy((qkv.shape[0], num_heads, cache.shape[4]), qkv.dtype, qkv.device)
        ring_rows(qkv, cache, out, slots, index.block_table, index.rings, scale, (q_norm, k_norm, cos_sin, eps))
        return out
    if index.prefill is not None or not decode.config.fused or _many(decode, num_heads // num_kv_heads):
        q = qkv_rope_write(qkv, num_heads, num_kv_heads, q_norm, k_norm, eps, cos_sin, cache, slots, index, scales=scales)
        return indexed_attention(q, cache, index, scale=scale, softcap=softcap, sinks=sinks, scales=scales)
    if qkv.stride(1) != 1 or cos_sin.stride(1) != 1:
        qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
    dim = cache.shape[4]
    q = qkv.as_strided((qkv.shape[0], num_heads, dim), (qkv.stride(0), dim, 1), qkv.storage_offset())
    out = roomy(q.shape, q.dtype, q.device)
    decode_rows(q, cache, out, index, scale, softcap, sinks, (q_norm, k_norm, cos_sin, eps), scales)
    return out


OVERRIDES: dict[str, Callable[..., Any]] = {
    "attention_index": attention_index,
    "indexed_write": indexed_write,
    "indexed_attention": indexed_attention,
    "paged_attention": paged_attention,
    "segment_attention": packed_segment_attention,
    "write_cache": write_cache,
    "gather_pages": gather_pages,
    "qkv_rope_write": qkv_rope_write,
    "qkv_attention": qkv_attention,
}
FIXED: dict[str, Callable[..., Any]] = {
    "attention_index": fixed_index,
    "indexed_write": indexed_write,
    "indexed_attention": fixed_indexed_attention,
    "paged_attention": fixed_paged_attention,
    "write_cache": write_cache,
}


choose_few = partial(choose_prefill, few=True)


def _decode_build(kind: str, group: int, dim: int, rows: int, queries: int = 1, fused: bool = False, kept: str = "") -> Build:
    """kept: the cache's type, where it is scaled."""
    config = choose_decode(rows, dim, torch.float32 if kind == "fp32" else torch.bfloat16)
    rows_out = next_power_of_2(group * queries)
    constants = {
        "NUM_KV": 8,
        "GROUP": group,
        "QUERIES": queries,
        "PAGE": 16,
        "D": dim,
        "BLOCK_D": next_power_of_2(dim),
        "BLOCK_M": max(16, rows_out),
        "BLOCK_S": config.block_keys,
        "M_OUT": rows_out,
        "AT_ONCE": combined_at_once(rows_out, next_power_of_2(dim)),
        "HOLD": config.hold and not fused,
        "R": dim if fused else 0,
        "HAS_NORM": fused,
        "HAS_SCALES": bool(kept),
        "IN_HALF": (kind, kept) == ("bf16", "fp8e4nv"),
    }
    # Outside the loop: A100's compiler prefers them to a lower occupancy, B200's where values are scaled.
    spill = 16 if fused or kept else 0
    signature = _signature(kind, kept)
    if config.stream and not kept:
        constants = {name: value for name, value in constants.items() if name in decode_stream.arg_names} | {"GPU": True}
        plain = {name: value for name, value in _PLAIN.items() if name in decode_stream.arg_names}
        return Build(decode_stream, signature, constants | plain, config.num_warps, config.num_stages, spill, _STEPS)
    return Build(decode_attention, signature, constants | _PLAIN, config.num_warps, config.num_stages, spill, _STEPS, _capabilities(kept))


def _prefill_build(kind: str, group: int, dim: int, choose: Callable[..., PrefillConfig] = choose_prefill, kept: str = "") -> Build:
    config = choose(dim, torch.float32 if kind == "fp32" else torch.bfloat16)
    constants = {
        "NUM_KV": 8,
        "GROUP": group,
        "TILE": config.block_queries // group,
        "PAGE": 16,
        "D": dim,
        "BLOCK_D": next_power_of_2(dim),
        "BLOCK_M": config.block_queries,
        "BLOCK_S": config.block_keys,
        "HAS_SCALES": bool(kept),
        "IN_HALF": (kind, kept) == ("bf16", "fp8e4nv"),
        "PARTS": config.part_keys > 0,
        "GPU": True,
    }
    # Outside the loops; outputs of 128 x 256 take half of the registers. Four warps of the fixed tiles hold more each.
    spill = 320 if dim > 128 else 16 if choose is choose_prefill else 64
    signature = _signature(kind, kept)
    return Build(prefill_attention, signature, constants | _PLAIN, config.num_warps, config.num_stages, spill, _STEPS, _capabilities(kept))


def _gathered_build(kind: str, group: int, dim: int, scaled: bool = False) -> Build:
    config = gathered_config(dim)
    keys = dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{kind}[{config.block_keys}, {dim}]>")
    signature = _signature(kind) | keys | {"starts_ptr": "*i32"}
    constants = {"NUM_KV": 8, "GROUP": group, "TILE": config.block_queries // group, "D": dim, "BLOCK_M": config.block_queries}
    constants |= {"BLOCK_S": config.block_keys, "HAS_SOFTCAP": False, "HAS_SINKS": False, "HAS_SCALES": scaled, "PDL": True}
    return Build(gathered_attention, signature, constants, config.num_warps, config.num_stages, 0, _STEPS, (90, 100))


def _capabilities(kept: str) -> tuple[int, ...]:
    """Where a cache of this type can be read."""
    return tuple(c for c in CAPABILITIES if c >= FLOAT8_SINCE) if kept == "fp8e4nv" else CAPABILITIES


def _signature(kind: str, kept: str = "") -> dict[str, str]:
    """Types of both attention kernels' arguments."""
    values = dict.fromkeys(("q_ptr", "out_ptr", "sinks_ptr", "q_norm_ptr", "k_norm_ptr"), f"*{kind}") | {"cache_ptr": f"*{kept or kind}"}
    lists = dict.fromkeys(("items_ptr", "tiles_ptr", "count_ptr", "arrivals_ptr", "table_ptr"), "*i32")
    numbers = {"scale": "fp32", "softcap": "fp32", "window": "i32", "eps": "fp32", "slots_ptr": "*i64"}
    numbers |= dict.fromkeys(("partial_ptr", "lse_ptr", "outputs_ptr", "sums_ptr", "cos_sin_ptr", "scales_ptr"), "*fp32")
    return values | lists | numbers | dict.fromkeys(_STEPS, "i32")


def _qkv_build(kind: str, heads: int, kv_heads: int, dim: int, block: int, norm: bool, kept: str = "") -> Build:
    values = dict.fromkeys(("qkv_ptr", "out_ptr", "q_norm_ptr", "k_norm_ptr"), f"*{kind}") | {"cache_ptr": f"*{kept or kind}"}
    steps = ("qkv_token", "cos_sin_token", "page_rows")
    signature = values | {"cos_sin_ptr": "*fp32", "scales_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32"} | dict.fromkeys(steps, "i32")
    constants = {"HQ": heads, "HK": kv_heads, "D": dim, "R": dim, "PAGE": 16, "BLOCK_H": block, "HAS_NORM": norm, "PDL": True}
    constants |= {"BLOCK_HALF": dim // 2, "BLOCK_REST": 1, "HAS_SCALES": bool(kept)}
    warps = 1 if block <= 4 else 4
    return Build(norm_rotate_write, signature, constants, num_warps=warps, divisible=steps, capabilities=_capabilities(kept))


def _ring_build(group: int, rows: int) -> Build:
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    values = dict.fromkeys(("qkv_ptr", "cache_ptr", "out_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16")
    lists = dict.fromkeys(("pieces_ptr", "arrivals_ptr", "query_len_ptr", "seq_len_ptr", "table_ptr"), "*i32")
    numbers = dict.fromkeys(("outputs_ptr", "sums_ptr", "cos_sin_ptr"), "*fp32") | {"slots_ptr": "*i64", "scale": "fp32", "eps": "fp32"}
    steps = ("qkv_token", "page_rows", "cos_sin_token")
    signature = {"desc": f"tensordesc<bf16[16, {HALF}],{layout!r}>"} | values | lists | numbers
    signature |= dict.fromkeys((*steps, "table_row", "columns", "N"), "i32")
    config = ring_config(rows, group)
    constants = {"NUM_KV": 8, "GROUP": group, "PAGE": 16, "D": 2 * HALF, "SLOTS": config.buffers, "ASKING": config.asking}
    return Build(decode_ring, signature, constants | {"HAS_NORM": True, "PDL": True}, 4, 3, 16, steps, (90,), config.registers)


def _deal_build(rows: int) -> Build:
    lists = dict.fromkeys(("pieces_ptr", "arrivals_ptr", "query_len_ptr", "seq_len_ptr", "table_ptr"), "*i32")
    signature = lists | dict.fromkeys(("num_rows", "programs", "columns", "table_row"), "i32")
    constants = {"PAGE": 16, "NUM_KV": 8, "LEAST": LEAST_PAGES, "CUT": CUT_PAGES, "FIRST": FIRST_PAGES}
    constants |= {"BLOCK_ROWS": rows, "BLOCK": AT_ONCE}
    return Build(deal_pages, signature, constants)


def _gather_build(kind: str, token: int, kept: str = "") -> Build:
    values = {"out_ptr": f"*{kind}", "cache_ptr": f"*{kept or kind}"}
    lists = dict.fromkeys(("table_ptr", "starts_ptr", "lengths_ptr"), "*i32")
    signature = values | lists | dict.fromkeys(("table_row", "page_rows"), "i32")
    constants, steps = {"PAGE": 16, "TOKEN": token, "BLOCK": BLOCK}, ("page_rows",)
    return Build(copy_pages, signature, constants, num_warps=8, divisible=steps, capabilities=_capabilities(kept))


def _list_builds() -> list[Build]:
    rows_of = ("query_start_ptr", "query_len_ptr", "seq_len_ptr")
    pointers = ("items_ptr", "tiles_ptr", "count_ptr", "arrivals_ptr", "sorted_ptr", "starts_ptr", *rows_of)
    numbers = ("num_rows", "capacity", "window", "any_chunk", "num_tokens", "slots", "num_arrivals")
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(numbers, "i32")
    rows = {"HAS_WINDOW": False, "BLOCK_ROWS": 256, "QUERIES": 1}
    tiles = {"TILE": 64, "BLOCK_TILES": 4, "BLOCK_KEYS": 0, "PART_KEYS": 0, "MOST_PARTS": MOST_PARTS}
    many = {"BLOCK_ROWS": 2048, "BLOCK_TILES": 1}
    return [
        *[Build(decode_items, types, rows | {"CHUNK": chunk, "NUM_KV": 8, "BLOCK_CHUNKS": 4, "NUM_BINS": 8}) for chunk in (0, 512)],
        *[Build(prefill_tiles, types, rows | tiles | {"BLOCK_KEYS": keys}) for keys in (0, 64)],
        *[Build(prefill_tiles, types, rows | tiles | many | {"PART_KEYS": keys}, num_warps=16) for keys in (0, PART_KEYS)],
        Build(sort_tiles, types, {"BLOCK": 32, "BLOCK_OTHERS": 64}),
    ]


_STEPS = ("q_token", "q_head", "table_row", "page_rows", "cos_sin_token")
_PLAIN = {"HAS_SOFTCAP": False, "HAS_WINDOW": False, "HAS_SINKS": False, "PDL": True}
BUILDS = [
    *[_decode_build("bf16", 2, 128, rows) for rows in (1, 8, 128, 1024)],
    *[_decode_build("bf16", 2, 128, rows, fused=True) for rows in (1, 8, 32)],
    *[_decode_build("bf16", 2, 128, rows, queries, fused=True) for rows, queries in ((1, 2), (8, 2), (1, 4), (4, 4))],
    _decode_build("bf16", 4, 128, 8, 2, fused=True),
    _decode_build("bf16", 4, 128, 8, fused=True),
    *[_decode_build("bf16", 3, 64, rows) for rows in (1, 128)],
    _decode_build("bf16", 3, 64, 1, fused=True),
    _decode_build("bf16", 2, 16, 8, fused=True),
    _decode_build("bf16", 4, 128, 32, queries=4),
    _decode_build("fp16", 2, 256, 32),
    _decode_build("fp16", 2, 256, 32, fused=True),
    _decode_build("fp32", 3, 64, 1),
    *[_prefill_build("bf16", group, dim) for group, dim in ((2, 128), (3, 64), (2, 256))],
    _prefill_build("fp32", 3, 64),
    *[_prefill_build("bf16", group, dim, choose_few) for group, dim in ((2, 128), (3, 64))],
    *[_prefill_build("bf16", group, dim, fixed_config) for group, dim in ((2, 128), (3, 64), (2, 256))],
    _qkv_build("bf16", 16, 8, 128, 4, True),
    _qkv_build("bf16", 16, 8, 128, 16, True),
    _qkv_build("fp32", 9, 3, 64, 16, False),
    _gather_build("bf16", 2 * 8 * 128),
    *[_gathered_build("bf16", group, dim) for group, dim in ((2, 128), (3, 64), (4, 128))],
    *[_decode_build("bf16", 2, 128, rows, kept="fp8e4nv") for rows in (1, 128)],
    *[_decode_build("bf16", 2, 128, rows, fused=True, kept="fp8e4nv") for rows in (1, 8, 32)],
    _decode_build("bf16", 4, 128, 8, fused=True, kept="fp8e4nv"),
    _decode_build("bf16", 3, 64, 1, fused=True, kept="fp8e4nv"),
    _decode_build("fp16", 2, 256, 32, fused=True, kept="fp8e4nv"),
    _decode_build("fp32", 3, 64, 1, kept="fp8e4nv"),
    *[_prefill_build("bf16", group, dim, kept="fp8e4nv") for group, dim in ((2, 128), (3, 64), (2, 256))],
    _qkv_build("bf16", 16, 8, 128, 16, True, "fp8e4nv"),
    _gather_build("bf16", 2 * 8 * 128, "fp8e4nv"),
    _gathered_build("bf16", 2, 128, scaled=True),
    *_list_builds(),
]
if RINGS:
    from modelrunner.kernels.attention.ring import decode_ring

    BUILDS += [_ring_build(group, rows) for group in (2, 4) for rows in (16, 64)] + [_deal_build(rows) for rows in (32, 64, 128)]
