"""What there is to attend to in one step, worked out on the device: a list of items that persistent programs share out.

Decode rows (the first ones, a fixed number of query tokens each) are cut along their keys, into chunks that begin at multiples of the chunk
size, so that where a row is cut depends on its own positions alone. The other rows are cut along their queries, into tiles. Which rows are
which is read off where their tokens begin. Buffers are sized by upper bounds that follow from shapes; how much of them counts is a number
on the device, so one captured graph serves all lengths, and all mixtures of decode rows and prompts.

Letters: N rows, T tokens, H query heads, HK key-value heads, G = H / HK, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import next_power_of_2, processors
from modelrunner.kernels.attention.index import rows_per_page
from modelrunner.kernels.attention.prefill_list import (
    ITEM,
    MAX_BLOCK,
    MIXED_ROWS,
    ROWS_ANYWHERE,
    USUAL_QUERIES,
    PrefillConfig,
    PrefillList,
    choose_gathered,
    choose_prefill,
    decodes,
    prefill_list,
)
from modelrunner.kernels.attention.ring_rows import RingWork, choose_rings, ring_work

BINS = 8  # lengths that last chunks are sorted into, longest first; more of them if they would be
BIN_KEYS = 128  # keys apart, and more
FEW_ROWS = 32  # beside prompts, whose chunks of many sizes are no builds of their own
PARTIAL_BYTES = 32 << 20  # of partial results; beyond it chunks grow


@dataclass(frozen=True)
class DecodeConfig:
    """chunk: keys of an item, a multiple of block_keys, which are attended to at a time. programs: per multiprocessor.

    fused: rotation and cache write of a row's one new token are part of its attention. hold: where they are not, the first block of keys is
    in registers before the queries are there. stream: a program reads the keys of its items without a pause, see `stream.py`.
    """

    chunk: int
    block_keys: int
    num_warps: int
    num_stages: int
    programs: int
    hold: bool = False
    fused: bool = False
    stream: bool = False


@dataclass(frozen=True)
class DecodeList:
    """items: [capacity, ITEM] int32 and count [1] int32 of them. arrivals: [rows * HK] int32, zeros between launches: finished chunks.

    partial: [slots, HK, queries * G, D] float32 outputs of chunks. lse: the same shape, log2 of the sum of their weights for each element.
    """

    config: DecodeConfig
    rows: int
    queries: int
    items: torch.Tensor
    count: torch.Tensor
    arrivals: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionWork:
    """One step of one cache group. slots: [T] int64, -1: not written. page_rows: distance of two pages, in tokens. rings: the decode rows
    once more, where rings serve what they serve of attention and there are no other rows."""

    num_kv_heads: int
    page_rows: int
    window: int | None
    slots: torch.Tensor
    block_table: torch.Tensor
    decode: DecodeList
    prefill: PrefillList | None
    rings: RingWork | None = None


@triton.jit(do_not_specialize=["num_rows", "capacity", "window", "any_chunk"], do_not_specialize_on_alignment=ROWS_ANYWHERE)
def decode_items(
    items_ptr,
    count_ptr,
    arrivals_ptr,
    query_start_ptr,
    query_len_ptr,
    seq_len_ptr,
    num_rows,
    capacity,
    window,
    any_chunk,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    """Write the items (row, first key, end key, length, query length, slot of the partial result or -1, chunk, chunks) of decode rows.

    A row of one chunk, a dead one too, needs no partial result. All chunks but the rows' last are long and come first; the last ones follow
    by falling length. If the partial results would not fit into `capacity`, chunks double until they do.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    there = decodes(rows, rows < num_rows, query_start_ptr, QUERIES)
    query_len = tl.load(query_len_ptr + rows, mask=there, other=0)
    seq_len = tl.load(seq_len_ptr + rows, mask=there, other=0)
    first = tl.zeros([BLOCK_ROWS], tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(seq_len - query_len - (window - 1), 0)
    chunk = tl.full((), CHUNK, tl.int32)
    if CHUNK == 0:
        chunk += any_chunk
    splits = tl.cdiv(seq_len, chunk) - first // chunk
    slots = tl.where(splits > 1, splits, 0)
    while tl.sum(slots, 0) > capacity:
        chunk = chunk * 2
        splits = tl.cdiv(seq_len, chunk) - first // chunk
        slots = tl.where(splits > 1, splits, 0)
    slot = tl.where(splits > 1, tl.cumsum(slots, 0) - slots, -1)
    early = tl.where(there, tl.maximum(splits, 1) - 1, 0)
    early_start = tl.cumsum(early, 0) - early
    offset = tl.sum(early, 0)
    tl.store(count_ptr, offset + tl.sum(there.to(tl.int32), 0))

    first_chunk = first // chunk
    last_start = tl.maximum(first, (first_chunk + early) * chunk)
    size = (seq_len - last_start) * NUM_BINS // (chunk + 1)  # 0 .. NUM_BINS - 1
    place = tl.zeros([BLOCK_ROWS], tl.int32)
    for i in tl.static_range(NUM_BINS):
        here = (there & (size == NUM_BINS - 1 - i)).to(tl.int32)
        place += here * (offset + tl.cumsum(here, 0) - 1)
        offset += tl.sum(here, 0)
    item = items_ptr + place * 8
    tl.store(item, rows, mask=there)
    tl.store(item + 1, last_start, mask=there)
    tl.store(item + 2, seq_len, mask=there)
    tl.store(item + 3, seq_len, mask=there)
    tl.store(item + 4, query_len, mask=there)
    tl.store(item + 5, tl.where(slot < 0, slot, slot + early), mask=there)
    tl.store(item + 6, early, mask=there)
    tl.store(item + 7, early + 1, mask=there)
    for head in range(NUM_KV):
        tl.store(arrivals_ptr + rows * NUM_KV + head, tl.zeros([BLOCK_ROWS], tl.int32), mask=rows < num_rows)

    for begin in range(0, tl.max(early, 0), BLOCK_CHUNKS):
        split = begin + tl.arange(0, BLOCK_CHUNKS)[None, :]
        mask = split < early[:, None]
        start = (first_chunk[:, None] + split) * chunk
        shape = tl.zeros([BLOCK_ROWS, BLOCK_CHUNKS], tl.int32)
        early_item = items_ptr + (early_start[:, None] + split) * 8
        tl.store(early_item, shape + rows[:, None], mask=mask)
        tl.store(early_item + 1, tl.maximum(start, first[:, None]), mask=mask)
        tl.store(early_item + 2, start + chunk, mask=mask)
        tl.store(early_item + 3, shape + seq_len[:, None], mask=mask)
        tl.store(early_item + 4, shape + query_len[:, None], mask=mask)
        tl.store(early_item + 5, slot[:, None] + split, mask=mask)
        tl.store(early_item + 6, shape + split, mask=mask)
        tl.store(early_item + 7, shape + early[:, None] + 1, mask=mask)


def attention_index(
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
    """`kernels.attention.index.attention_index` with the work found on the device. Arguments as there; launches one to three kernels.

    num_decode says only whether there are other rows too: then decode rows are found on the device.
    """
    limits = (num_decode, decode_query, max_seq_len, window)
    gathered = choose_gathered(cache, num_heads, query_len.shape[0] - num_decode, max_query, max_seq_len, window, dtype or cache.dtype)
    return build_work(cache, block_table, query_start, query_len, seq_len, slots, num_heads, limits, dtype or cache.dtype, None, gathered)


def build_work(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    limits: tuple[int, int, int, int | None],
    dtype: torch.dtype,
    decode_config: DecodeConfig | None = None,
    prefill_config: PrefillConfig | None = None,
) -> AttentionWork:
    """`attention_index` with configurations of choice. limits: num_decode, decode_query, max_seq_len, window."""
    num_decode, decode_query, max_seq_len, window = limits
    num_kv_heads, head_dim = cache.shape[3], cache.shape[4]
    num_tokens = slots.shape[0]
    group = num_heads // num_kv_heads
    rows, prefill = query_len.shape[0], None
    shape = (rows, decode_query, num_kv_heads, group, head_dim)
    config = decode_config or choose_decode(rows, head_dim, dtype)
    mixed = num_tokens > num_decode * decode_query
    decode = _decode_list(config, shape, query_start, query_len, seq_len, max_seq_len, window, MIXED_ROWS if mixed else 1)
    if mixed:
        bounds = (num_decode, decode_query, num_tokens, max_seq_len, window)
        few = -(-num_tokens * group // USUAL_QUERIES) * num_kv_heads < processors(cache.device)
        tiles, heads = prefill_config or choose_prefill(head_dim, dtype, few), (num_kv_heads, group, head_dim)
        prefill = prefill_list(tiles, heads, bounds, query_start, query_len, seq_len)
    rings = None
    if not mixed and decode_query == 1 and window is None and decode_config is None:
        ring = choose_rings(cache, rows, num_heads, dtype)
        rings = None if ring is None else ring_work(ring, cache, num_heads, block_table, query_len, seq_len)
    return AttentionWork(num_kv_heads, rows_per_page(cache), window, slots, block_table, decode, prefill, rings)


@lru_cache(maxsize=256)
def choose_decode(num_rows: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """Few rows: short chunks, so that all multiprocessors read. Many rows: long ones, which leave few partial results.

    By `tests/gpu/bench_decode.py` on an H200: best is about as many chunks, times key heads, as fill the multiprocessors once or twice.
    """
    if dtype == torch.float32:
        return DecodeConfig(chunk=128, block_keys=32, num_warps=4, num_stages=2, programs=2)
    if num_rows > 512:  # many units a program, which by themselves do not all end at once
        return DecodeConfig(chunk=1024, block_keys=32, num_warps=2, num_stages=4, programs=4)
    if num_rows > 32:
        return DecodeConfig(2048 if num_rows > 96 else 1024, block_keys=32, num_warps=2, num_stages=3, programs=4, stream=True)
    chunk = 64 if num_rows <= 2 else 128 if num_rows <= 4 else 256 if num_rows <= 8 else 384 if num_rows <= 16 else 1024
    stages = 2 if num_rows <= 2 else 3 if num_rows <= 8 else 4
    return DecodeConfig(chunk, 32 if head_dim > 128 else 64, 4, stages, programs=2, hold=num_rows <= 4, fused=True)


def _decode_list(
    config: DecodeConfig,
    shape: tuple[int, int, int, int, int],
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
    max_seq_len: int,
    window: int | None,
    least_block: int,
) -> DecodeList:
    rows, queries, num_kv_heads, group, head_dim = shape
    device = query_len.device
    chunks = -(-max(max_seq_len, 1) // config.chunk)
    if window is not None:
        chunks = min(chunks, (window + queries - 2) // config.chunk + 2)
    slot_floats = num_kv_heads * queries * group * head_dim
    capacity = 0 if chunks == 1 else min(rows * chunks, max(chunks, PARTIAL_BYTES // (8 * slot_floats)))
    items = torch.empty((rows + capacity, ITEM), dtype=torch.int32, device=device)
    small = torch.empty(1 + rows * num_kv_heads, dtype=torch.int32, device=device)
    partial = torch.empty((max(capacity, 1), num_kv_heads, queries * group, head_dim), dtype=torch.float32, device=device)
    lse = torch.empty_like(partial)
    block = max(next_power_of_2(rows), least_block)
    decode_items[(1,)](
        items,
        small,
        small[1:],
        query_start,
        query_len,
        seq_len,
        rows,
        capacity,
        window or 0,
        config.chunk,
        QUERIES=queries,
        CHUNK=0 if rows <= FEW_ROWS and least_block > 1 else config.chunk,
        HAS_WINDOW=window is not None,
        NUM_KV=num_kv_heads,
        BLOCK_ROWS=block,
        BLOCK_CHUNKS=max(1, MAX_BLOCK // block),
        NUM_BINS=max(BINS, config.chunk // BIN_KEYS) if rows > 16 or least_block > 1 else 1,
        num_warps=4 if block <= 1024 else 16,
    )
    return DecodeList(config, rows, queries, items, small[:1], small[1:], partial, lse)
