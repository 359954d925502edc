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

from modelrunner.kernels.attention.device import next_power_of_2
from modelrunner.kernels.attention.index import rows_per_page

ITEM = 8  # int32 words of an item, see the kernels
BINS = 8  # lengths that last chunks are sorted into, longest first
PARTIAL_BYTES = 32 << 20  # of partial results; beyond it chunks grow
MAX_BLOCK = 1024  # items written at a time
MIXED_ROWS = 1024  # of a list of a step with prompts, at least: such steps have any number of rows, and each power of two is a build


@dataclass(frozen=True)
class DecodeConfig:
    """chunk: keys of an item, a multiple of block_keys, which are attended to at a time. programs: per multiprocessor.

    fused: rotation and cache write of a row's one new token are part of its attention. hold: where they are not, the first block of keys is
    in registers before the queries are there.
    """

    chunk: int
    block_keys: int
    num_warps: int
    num_stages: int
    programs: int
    hold: bool = False
    fused: bool = False


@dataclass(frozen=True)
class PrefillConfig:
    """block_queries: queries times grouped heads of a tile. block_keys: keys at a time. programs: per multiprocessor."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int
    programs: int


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
class PrefillList:
    """tiles: [capacity, ITEM] int32 and count [1] int32 of them, longest first."""

    config: PrefillConfig
    tile_query: int
    tiles: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class AttentionWork:
    """One step of one cache group. slots: [T] int64, -1: not written. page_rows: distance of two pages, in tokens."""

    num_kv_heads: int
    page_rows: int
    window: int | None
    slots: torch.Tensor
    block_table: torch.Tensor
    decode: DecodeList
    prefill: PrefillList | None


@triton.jit
def decodes(rows, there, query_start_ptr, QUERIES: tl.constexpr):
    """Which rows are decode rows: those whose tokens lie where they do if all rows before have QUERIES query slots, and this one too."""
    begin = tl.load(query_start_ptr + rows, mask=there, other=-1)
    end = tl.load(query_start_ptr + rows + 1, mask=there, other=-1)
    return there & (begin == rows * QUERIES) & (end == (rows + 1) * QUERIES)


@triton.jit
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


@triton.jit
def prefill_tiles(
    tiles_ptr,
    count_ptr,
    query_start_ptr,
    query_len_ptr,
    seq_len_ptr,
    num_rows,
    num_tokens,
    window,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the tiles (row, first query, query length, length, first token, tokens, keys, 0) of the rows after the decode rows, in order.

    Tokens that no row owns, at the end, are tiles of a dead row: their outputs are written too.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    there = rows < num_rows
    query_len = tl.load(query_len_ptr + rows, mask=there, other=0)
    seq_len = tl.load(seq_len_ptr + rows, mask=there, other=0)
    begin = tl.load(query_start_ptr + rows, mask=rows <= num_rows, other=num_tokens)
    end = tl.load(query_start_ptr + rows + 1, mask=there, other=num_tokens)
    tiles = tl.where(decodes(rows, there, query_start_ptr, QUERIES), 0, tl.cdiv(end - begin, TILE))
    tile_start = tl.cumsum(tiles, 0) - tiles
    tl.store(count_ptr, tl.sum(tiles, 0))
    for tile_begin in range(0, tl.max(tiles, 0), BLOCK_TILES):
        tile = tile_begin + tl.arange(0, BLOCK_TILES)[None, :]
        mask = tile < tiles[:, None]
        first = tile * TILE
        live = tl.minimum(query_len[:, None] - first, TILE)
        last = seq_len[:, None] - query_len[:, None] + first + live
        keys = last
        if HAS_WINDOW:
            keys = tl.minimum(last, window + live - 1)
        shape = tl.zeros([BLOCK_ROWS, BLOCK_TILES], tl.int32)
        out = tiles_ptr + (tile_start[:, None] + tile) * 8
        tl.store(out, shape + rows[:, None], mask=mask)
        tl.store(out + 1, shape + first, mask=mask)
        tl.store(out + 2, shape + query_len[:, None], mask=mask)
        tl.store(out + 3, shape + seq_len[:, None], mask=mask)
        tl.store(out + 4, begin[:, None] + first, mask=mask)
        tl.store(out + 5, tl.minimum(end[:, None] - begin[:, None] - first, TILE), mask=mask)
        tl.store(out + 6, tl.where(live > 0, keys, 0), mask=mask)
        tl.store(out + 7, shape, mask=mask)


@triton.jit
def sort_tiles(sorted_ptr, tiles_ptr, count_ptr, BLOCK: tl.constexpr, BLOCK_OTHERS: tl.constexpr):
    """Copy the tiles in falling order of their keys; equal ones keep their order. Each program finds the places of BLOCK tiles."""
    count = tl.load(count_ptr)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tile < count
    keys = tl.load(tiles_ptr + tile * 8 + 6, mask=there, other=0)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, BLOCK_OTHERS):
        other = begin + tl.arange(0, BLOCK_OTHERS)
        others = tl.load(tiles_ptr + other * 8 + 6, mask=other < count, other=-1)[None, :]
        before = (others > keys[:, None]) | ((others == keys[:, None]) & (other[None, :] < tile[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    word = tl.arange(0, 8)[None, :]
    words = tl.load(tiles_ptr + tile[:, None] * 8 + word, mask=there[:, None], other=0)
    tl.store(sorted_ptr + place[:, None] * 8 + word, words, mask=there[:, None])


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
    return build_work(cache, block_table, query_start, query_len, seq_len, slots, num_heads, limits, dtype or cache.dtype)


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
        tiles = prefill_config or choose_prefill(head_dim, dtype)
        prefill = _prefill_list(tiles, group, decode_query, query_start, query_len, seq_len, num_tokens, window)
    return AttentionWork(num_kv_heads, rows_per_page(cache), window, slots, block_table, decode, prefill)


@lru_cache(maxsize=256)
def choose_decode(num_rows: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """Few rows: short chunks, so that all multiprocessors read. Many rows: long ones, which leave few partial results.

    By `tests/gpu/bench_decode.py` on an H200: best is about as many chunks, times key heads, as fill the multiprocessors once or twice.
    """
    if dtype == torch.float32:
        return DecodeConfig(chunk=128, block_keys=32, num_warps=4, num_stages=2, programs=2)
    if num_rows > 32:
        return DecodeConfig(chunk=1024, block_keys=32, num_warps=2, num_stages=4, programs=4)
    chunk = 64 if num_rows <= 2 else 128 if num_rows <= 4 else 256 if num_rows <= 8 else 384 if num_rows <= 16 else 1024
    stages = 2 if num_rows <= 2 else 3 if num_rows <= 8 else 4
    return DecodeConfig(chunk, 32 if head_dim > 128 else 64, 4, stages, programs=2, hold=num_rows <= 4, fused=True)


@lru_cache(maxsize=256)
def choose_prefill(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    if dtype == torch.float32:
        return PrefillConfig(block_queries=32, block_keys=32, num_warps=4, num_stages=2, programs=2)
    if head_dim > 128:
        return PrefillConfig(block_queries=128, block_keys=32, num_warps=8, num_stages=2, programs=1)
    if head_dim <= 64:
        return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3, programs=2)
    return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3, programs=1)


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
        QUERIES=queries,
        CHUNK=config.chunk,
        HAS_WINDOW=window is not None,
        NUM_KV=num_kv_heads,
        BLOCK_ROWS=block,
        BLOCK_CHUNKS=max(1, MAX_BLOCK // block),
        NUM_BINS=BINS if rows > 16 or least_block > 1 else 1,
        num_warps=4 if block <= 1024 else 16,
    )
    return DecodeList(config, rows, queries, items, small[:1], small[1:], partial, lse)


def _prefill_list(
    config: PrefillConfig,
    group: int,
    decode_query: int,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
    num_tokens: int,
    window: int | None,
) -> PrefillList:
    tile_query = max(config.block_queries, next_power_of_2(group)) // group
    num_rows, device = query_len.shape[0], query_len.device
    rows = num_rows + 1  # and one of the tokens that nobody owns
    capacity = num_tokens // tile_query + rows
    unsorted = torch.empty((capacity, ITEM), dtype=torch.int32, device=device)
    tiles = torch.empty_like(unsorted)
    count = torch.empty(1, dtype=torch.int32, device=device)
    block = max(next_power_of_2(rows), MIXED_ROWS)
    prefill_tiles[(1,)](
        unsorted,
        count,
        query_start,
        query_len,
        seq_len,
        num_rows,
        num_tokens,
        window or 0,
        QUERIES=decode_query,
        TILE=tile_query,
        HAS_WINDOW=window is not None,
        BLOCK_ROWS=block,
        BLOCK_TILES=max(1, MAX_BLOCK // block),
        num_warps=4 if block <= 1024 else 16,
    )
    sort_tiles[(triton.cdiv(capacity, 32),)](tiles, unsorted, count, BLOCK=32, BLOCK_OTHERS=64)
    return PrefillList(config, tile_query, tiles, count)
