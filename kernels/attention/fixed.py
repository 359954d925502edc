"""Attention whose every query is computed alike, however many there are beside it (the mode `device.deterministic`).

Decoding rows too are tiles of queries, with keys from the first one on in blocks of one size. A block that a query does not see changes
nothing in its sums, so which queries share a tile does not matter; products and sums are not contracted, so that blocks with and without
a mask round alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from modelrunner.kernels.attention.index import rows_per_page
from modelrunner.kernels.attention.prefill import prefill_rows
from modelrunner.kernels.attention.prefill_list import ITEM, PrefillConfig, prefill_list
from modelrunner.kernels.attention.work_list import AttentionWork, DecodeList, choose_decode


@lru_cache(maxsize=64)
def fixed_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """Tiles of 64 rows, the least that the tensor cores of Hopper take, since most hold one query."""
    if dtype == torch.float32:
        return PrefillConfig(block_queries=32, block_keys=32, num_warps=4, num_stages=2, programs=2)
    return PrefillConfig(block_queries=64, block_keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3, programs=2)


def fixed_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
    token_row: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_heads: int,
    num_decode: int,
    decode_query: int,
    max_query: int,
    max_seq_len: int,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionWork:
    """`kernels.attention.index.attention_index` with every row among the tiles of queries. Arguments as there."""
    dtype = dtype or cache.dtype
    bounds = (0, 0, slots.shape[0], max_seq_len, window)
    heads = (cache.shape[3], num_heads // cache.shape[3], cache.shape[4])
    tiles = prefill_list(fixed_config(cache.shape[4], dtype), heads, bounds, query_start, query_len, seq_len)
    return AttentionWork(cache.shape[3], rows_per_page(cache), window, slots, block_table, _no_rows(cache, dtype), tiles)


def _no_rows(cache: torch.Tensor, dtype: torch.dtype) -> DecodeList:
    """A list without decode rows."""
    words = torch.empty((0, ITEM), dtype=torch.int32, device=cache.device)
    floats = torch.empty((0, cache.shape[3], 0, cache.shape[4]), dtype=torch.float32, device=cache.device)
    return DecodeList(choose_decode(1, cache.shape[4], dtype), 0, 1, words, words, words, floats, floats)


def fixed_indexed_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: AttentionWork,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.attention.reference.indexed_attention` over what `fixed_index` returned. Invalid tokens get zeros."""
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prefill_rows(q, cache, out, index, scale, softcap, sinks, scales, enable_fp_fusion=False)
    return out


def fixed_paged_attention(q: torch.Tensor, cache: torch.Tensor, *rows: torch.Tensor, scale: float, **options: Any) -> torch.Tensor:
    """`kernels.attention.reference.paged_attention`: the index and the attention. rows, options: as there."""
    extra = {name: options.pop(name) for name in ("softcap", "sinks", "scales") if name in options}
    index = fixed_index(cache, *rows, num_heads=q.shape[1], dtype=q.dtype, **options)
    return fixed_indexed_attention(q, cache, index, scale=scale, **extra)
