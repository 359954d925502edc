"""The list of a step's prefill tiles: up to `tile_query` consecutive query tokens of a row, longest first. Letters as in `work_list.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import dependent_launch, next_power_of_2, processors
from modelrunner.kernels.attention.parts import MOST_PARTS, TileParts, room_for_parts

ITEM = 8  # int32 words of an item, see the kernels
MAX_BLOCK = 1024  # items written at a time
MIXED_ROWS = 1024  # of a list of a step with prompts, at least: such steps have any number of rows, and each power of two is a build
USUAL_QUERIES = 128  # times grouped heads, of a tile
GATHER_QUERIES = 2048  # of the longest prompt, from which on gathering was measured to pay
PART_KEYS = 512  # of a part of a tile, and more
_ANY_SIZE = ("num_rows", "num_tokens", "window", "slots", "num_arrivals")  # no build for each kind of number
ROWS_ANYWHERE = ("query_start_ptr", "query_len_ptr", "seq_len_ptr")  # nor for each way in which they may lie in memory
GATHER_BYTES = 512 << 20  # of gathered keys and values; beyond it they are read from their pages


@dataclass(frozen=True)
class PrefillConfig:
    """block_queries: queries times grouped heads of a tile. block_keys: keys at a time. programs: per multiprocessor.

    gathered: copy the keys out of their pages first, see `gathered.py`. part_keys: least keys of a part of a tile, see `parts.py`; 0: tiles
    stay whole.
    """

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int
    programs: int
    gathered: bool = False
    part_keys: int = 0


@dataclass(frozen=True)
class GatheredKeys:
    """Where the keys of rows from first_row on go when they are gathered: blocks of block_keys tokens, zeros after a row's last.

    starts: [N + 1] int32, a row's first token; decode rows have no room. lengths: [N] int32. num_tokens: bounds all tokens.
    max_tokens: those of a row.
    """

    first_row: int
    starts: torch.Tensor
    lengths: torch.Tensor
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class PrefillList:
    """tiles: [capacity, ITEM] int32 and count [1] int32 of them, or of their parts, longest first.

    keys: None where they are read from their pages. parts: None where tiles stay whole.
    """

    config: PrefillConfig
    tile_query: int
    tiles: torch.Tensor
    count: torch.Tensor
    keys: GatheredKeys | None
    parts: TileParts | None = None


@triton.jit
def decodes(rows, there, query_start_ptr, QUERIES: tl.constexpr):
    """Which rows are decode rows: those whose tokens lie where they do if all rows before have QUERIES query slots, and this one too."""
    begin = tl.load(query_start_ptr + rows, mask=there, other=-1)
    end = tl.load(query_start_ptr + rows + 1, mask=there, other=-1)
    return there & (begin == rows * QUERIES) & (end == (rows + 1) * QUERIES)


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=ROWS_ANYWHERE)
def prefill_tiles(
    tiles_ptr,
    count_ptr,
    starts_ptr,
    query_start_ptr,
    query_len_ptr,
    seq_len_ptr,
    arrivals_ptr,
    num_rows,
    num_tokens,
    window,
    slots,
    num_arrivals,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the tiles (row, first query, query length, length, first token, tokens, keys, part) of rows that are no decode rows, in order.

    Tokens that no row owns, at the end, are tiles of a dead row: their outputs are written too. BLOCK_KEYS: 0, or of what multiples the
    rows' keys take room in gathered memory; then the rows' places in it are written too. PART_KEYS: 0, or least keys of a part: tiles are
    cut into as many parts as there are slots for, and the last word is 256 first slot + 16 part + parts. Arrivals become zeros.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    there = rows < num_rows
    query_len = tl.load(query_len_ptr + rows, mask=there, other=0)
    seq_len = tl.load(seq_len_ptr + rows, mask=there, other=0)
    begin = tl.load(query_start_ptr + rows, mask=rows <= num_rows, other=num_tokens)
    end = tl.load(query_start_ptr + rows + 1, mask=there, other=num_tokens)
    decode = decodes(rows, there, query_start_ptr, QUERIES)
    tiles = tl.where(decode, 0, tl.cdiv(end - begin, TILE))
    parts = tl.full([BLOCK_ROWS], 1, tl.int32)
    if PART_KEYS:
        most = tl.minimum(slots // tl.maximum(tl.sum(tl.where(there, tiles, 0), 0), 1), MOST_PARTS)
        parts = tl.maximum(tl.minimum(seq_len // PART_KEYS, most), 1)
        tiles *= parts
        for first_arrival in range(0, num_arrivals, BLOCK_ROWS):
            arrival = first_arrival + rows
            tl.store(arrivals_ptr + arrival, tl.zeros([BLOCK_ROWS], tl.int32), mask=arrival < num_arrivals)
    tile_start = tl.cumsum(tiles, 0) - tiles
    tl.store(count_ptr, tl.sum(tiles, 0))
    if BLOCK_KEYS:
        room = tl.where(decode, 0, tl.cdiv(seq_len, BLOCK_KEYS) * BLOCK_KEYS)
        tl.store(starts_ptr + rows, tl.cumsum(room, 0) - room, mask=rows <= num_rows)
    for tile_begin in range(0, tl.max(tiles, 0), BLOCK_TILES):
        item = tile_begin + tl.arange(0, BLOCK_TILES)[None, :]
        mask = item < tiles[:, None]
        tile, part = item, 0
        if PART_KEYS:
            tile = item // parts[:, None]
            part = (tile_start[:, None] + tile * parts[:, None]) * 256 + item % parts[:, None] * 16 + parts[:, None]
        first = tile * TILE
        live = tl.minimum(query_len[:, None] - first, TILE)
        last = seq_len[:, None] - query_len[:, None] + first + live
        keys = last
        if HAS_WINDOW:
            keys = tl.minimum(last, window + live - 1)
        shape = tl.zeros([BLOCK_ROWS, BLOCK_TILES], tl.int32)
        out = tiles_ptr + (tile_start[:, None] + item) * 8
        tl.store(out, shape + rows[:, None], mask=mask)
        tl.store(out + 1, shape + first, mask=mask)
        tl.store(out + 2, shape + query_len[:, None], mask=mask)
        tl.store(out + 3, shape + seq_len[:, None], mask=mask)
        tl.store(out + 4, begin[:, None] + first, mask=mask)
        tl.store(out + 5, tl.minimum(end[:, None] - begin[:, None] - first, TILE), mask=mask)
        tl.store(out + 6, tl.where(live > 0, keys // parts[:, None], 0), mask=mask)
        tl.store(out + 7, shape + part, mask=mask)


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


@lru_cache(maxsize=256)
def choose_prefill(head_dim: int, dtype: torch.dtype, few: bool = False) -> PrefillConfig:
    """few: the usual tiles would leave multiprocessors without work, so they are smaller."""
    if dtype == torch.float32:
        return PrefillConfig(block_queries=32, block_keys=32, num_warps=4, num_stages=2, programs=2)
    if head_dim > 128:
        return PrefillConfig(block_queries=128, block_keys=32, num_warps=8, num_stages=2, programs=1)
    if few:
        return PrefillConfig(block_queries=64, block_keys=64, num_warps=4, num_stages=3, programs=2, part_keys=PART_KEYS)
    if head_dim <= 64:
        return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3, programs=2)
    return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3, programs=1)


def gathered_config(head_dim: int) -> PrefillConfig:
    return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3, programs=1 if head_dim > 64 else 2, gathered=True)


def choose_gathered(
    cache: torch.Tensor, num_heads: int, num_rows: int, max_query: int, max_seq_len: int, window: int | None, dtype: torch.dtype
) -> PrefillConfig | None:
    """The configuration of prompts whose keys are worth gathering; None for others. num_rows: prompts. dtype: of queries.

    Worth it: keys that are read by several tiles of queries, from Hopper on, where the tensor memory accelerator fetches them.
    """
    dim, group = cache.shape[4], num_heads // cache.shape[3]
    types = dtype != torch.float32 and cache.dtype in (dtype, torch.float8_e4m3fn)
    fits = dependent_launch(cache.device) and types and window is None and dim in (64, 128) and group <= 128
    config = gathered_config(dim)
    num_bytes = num_rows * _gathered_tokens(max_seq_len, config) * 2 * cache.shape[3] * dim * dtype.itemsize
    return config if fits and num_rows > 0 and max_query >= GATHER_QUERIES and num_bytes <= GATHER_BYTES else None


def _gathered_tokens(max_seq_len: int, config: PrefillConfig) -> int:
    """Bounds the room of a row's keys."""
    return -(-max_seq_len // config.block_keys) * config.block_keys


def prefill_list(
    config: PrefillConfig,
    heads: tuple[int, int, int],
    bounds: tuple[int, int, int, int, int | None],
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    seq_len: torch.Tensor,
) -> PrefillList:
    """heads: HK, G, D. bounds: num_decode (0 where only the device knows it), decode_query, num_tokens, max_seq_len, window."""
    num_decode, decode_query, num_tokens, max_seq_len, window = bounds
    num_kv, group, dim = heads
    block_queries = max(config.block_queries, next_power_of_2(group))
    tile_query = block_queries // group
    num_rows, device = query_len.shape[0], query_len.device
    rows = num_rows + 1  # and one of the tokens that nobody owns
    parts = None
    if config.part_keys and window is None and max_seq_len >= 2 * config.part_keys:
        parts = room_for_parts(processors(device) * config.programs, num_kv, block_queries, max(16, next_power_of_2(dim)), device)
    capacity = max(num_tokens // tile_query + rows, 0 if parts is None else parts.slots)
    unsorted = torch.empty((capacity, ITEM), dtype=torch.int32, device=device)
    tiles = torch.empty_like(unsorted)
    count = torch.empty(1, dtype=torch.int32, device=device)
    keys = None
    if config.gathered:
        starts = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
        tokens = _gathered_tokens(max_seq_len, config)
        keys = GatheredKeys(num_decode, starts, seq_len, (num_rows - num_decode) * tokens, tokens)
    block = max(next_power_of_2(rows), MIXED_ROWS)
    prefill_tiles[(1,)](
        unsorted,
        count,
        count if keys is None else keys.starts,
        query_start,
        query_len,
        seq_len,
        count if parts is None else parts.arrivals,
        num_rows,
        num_tokens,
        window or 0,
        0 if parts is None else parts.slots,
        0 if parts is None else parts.arrivals.shape[0],
        QUERIES=decode_query,
        TILE=tile_query,
        BLOCK_KEYS=0 if keys is None else config.block_keys,
        PART_KEYS=0 if parts is None else config.part_keys,
        MOST_PARTS=MOST_PARTS,
        HAS_WINDOW=window is not None,
        BLOCK_ROWS=block,
        BLOCK_TILES=max(1, MAX_BLOCK // block),
        num_warps=4 if block <= 1024 else 16,
    )
    sort_tiles[(triton.cdiv(capacity, 32),)](tiles, unsorted, count, BLOCK=32, BLOCK_OTHERS=64)
    return PrefillList(config, tile_query, tiles, count, keys, parts)
