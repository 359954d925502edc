"""Where attention over a paged cache finds its queries, keys and values in one step: worked out once, used by every layer of a cache group.

The step's queries are cut into tiles: up to `tile_query` consecutive query tokens of one row. A tile gathers the keys it can see, one
index per token, so that whatever must not be read (unused slots, freed pages of a window, dead rows) is read from the null page instead.

Dimension letters: N rows and T tokens of the step, W tiles, Q queries of a tile, S keys of a tile, P pages of a block table, H query
heads, HK key-value heads, G = H / HK, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

MAX_KEYS = 1 << 13  # gathered tokens at a time: bounds scratch memory, and keeps more of it in the cache
MAX_SCORES = 1 << 24  # mask elements at a time; bounds scratch memory
TILE_SIZES = (16, 32, 64, 128, 256, 512)
GATHER_COST = 24  # gathering a tile's keys costs about as much as attending to them with this many queries


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles that are attended to in one product.

    keys: [W * S] int64 rows of the token view (see `token_rows`), 0 for a key that is not there. mask: added to the scores, [W, 1, 1 or Q
    * G, S].
    queries: [W * Q] int64 tokens, or a slice of them.
    """

    num_tiles: int
    tile_query: int
    keys: torch.Tensor
    mask: torch.Tensor
    queries: torch.Tensor | slice


@dataclass(frozen=True)
class AttentionIndex:
    """One step of one cache group.

    tiles: all tiles in order, decode rows first. decode_tokens: the first tokens, whose outputs leave the tiles in order. places: for
    the other tokens, where in the remaining tiles' outputs theirs is, [T - decode_tokens] int64. write_rows: [T] int64 rows of the token
    view, 0 for a token that is not written. num_kv_heads: HK.
    """

    num_kv_heads: int
    num_tokens: int
    decode_tokens: int
    tiles: tuple[AttentionTiles, ...]
    places: torch.Tensor | None
    write_rows: torch.Tensor


@dataclass(frozen=True)
class _Step:
    """What all tiles of a step share. rows_per_page: distance of two pages in the token view. mask_dtype: of the queries."""

    block_table: torch.Tensor
    query_start: torch.Tensor
    query_len: torch.Tensor
    seq_len: torch.Tensor
    num_tokens: int
    tokens_per_page: int
    rows_per_page: int
    max_seq_len: int
    window: int | None
    group_size: int
    mask_dtype: torch.dtype


def token_rows(cache: torch.Tensor) -> torch.Tensor:
    """See one layer's cache [num_pages, tokens_per_page, 2, HK, D] as [rows, 2 * HK * D], one row a token, sharing memory.

    Token t of page p is row p * rows_per_page(cache) + t; the rows between two pages belong to other layers.
    """
    num_pages, tokens_per_page = cache.shape[:2]
    shape = ((num_pages - 1) * rows_per_page(cache) + tokens_per_page, cache.stride(1))
    return cache.as_strided(shape, (cache.stride(1), 1))


def rows_per_page(cache: torch.Tensor) -> int:
    """Rows of the token view between two pages. Raises ValueError for a cache whose memory cannot be seen so."""
    page, token = int(cache.stride(0)), int(cache.stride(1))
    if not cache[0, 0].is_contiguous() or token != cache[0, 0].numel() or page % token:
        raise ValueError(
            f"cache of shape {tuple(cache.shape)} has strides {cache.stride()}; a token's keys and values must be contiguous, "
            f"tokens of a page adjacent, and the distance between pages a multiple of {token} elements"
        )
    return page // token


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
) -> AttentionIndex:
    """Prepare one step's attention over a cache group.

    cache: [num_pages, tokens_per_page, 2, HK, D] of any layer of the group (only its shape and strides are used). block_table: [N, P]
    int32.
    query_start: [N+1] int32. query_len, seq_len: [N] int32, 0 for a dead row. token_row: [T] int64. slots: [T] int64, -1: not written.
    The first num_decode rows have decode_query tokens each. max_query: bounds the query tokens of the others. max_seq_len: bounds seq_len.
    window: tokens that a query sees, itself included. dtype: of the queries (default: the cache's).
    """
    tokens_per_page, num_kv_heads = cache.shape[1], cache.shape[3]
    num_rows, num_tokens = query_len.shape[0], slots.shape[0]
    step = _Step(
        block_table,
        query_start,
        query_len,
        seq_len,
        num_tokens,
        tokens_per_page,
        rows_per_page(cache),
        max(max_seq_len, 1),
        window,
        num_heads // num_kv_heads,
        dtype or cache.dtype,
    )
    decode_tokens = num_decode * decode_query
    tiles: list[AttentionTiles] = []
    places = None
    if num_decode:
        row = torch.arange(num_decode, device=slots.device)
        tiles += _tiles(step, row, torch.zeros_like(row), decode_query, in_order=True)
    if num_rows > num_decode and num_tokens > decode_tokens:
        row, first, tile_query, places = _prefill_tiles(step, token_row, num_decode, decode_tokens, max_query)
        tiles += _tiles(step, row, first, tile_query, in_order=False)
    written = slots.clamp(min=0)
    if step.rows_per_page != tokens_per_page:
        written = written + written // tokens_per_page * (step.rows_per_page - tokens_per_page)
    return AttentionIndex(num_kv_heads, num_tokens, decode_tokens, tuple(tiles), places, written)


def _prefill_tiles(
    step: _Step, token_row: torch.Tensor, num_decode: int, decode_tokens: int, max_query: int
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Cut the rows from num_decode on into tiles: each tile's row and first query [W], queries per tile, and each token's place in the
    output.
    """
    num_tokens, num_rows = step.num_tokens - decode_tokens, step.query_len.shape[0] - num_decode
    tile_query = choose_tile_query(num_tokens, num_rows, max_query)
    query_len = step.query_len[num_decode:]
    if tile_query == max_query:
        row = torch.arange(num_rows, device=query_len.device)
        first_tile, first = row, torch.zeros_like(row)
    else:
        count = (query_len + (tile_query - 1)) // tile_query
        end = count.cumsum(0)
        first_tile = end - count
        tile = torch.arange(num_tokens // tile_query + num_rows, device=query_len.device)
        row = torch.searchsorted(end, tile, right=True).clamp_(max=num_rows - 1)
        first = (tile - first_tile[row]) * tile_query  # tiles past the last one start past their row's queries
    token = torch.arange(decode_tokens, step.num_tokens, device=query_len.device)
    owner = token_row[decode_tokens:]
    place = first_tile[owner - num_decode] * tile_query + token - step.query_start[owner]
    return row + num_decode, first, tile_query, place.clamp_(0, row.shape[0] * tile_query - 1)


def choose_tile_query(num_tokens: int, num_rows: int, max_query: int) -> int:
    """Queries per tile for num_tokens tokens in num_rows rows of up to max_query: one tile a row unless that pads far more than it
    saves.
    """
    costs = {max_query: num_rows * (max_query + GATHER_COST)}
    for size in TILE_SIZES:
        if size < max_query:
            costs[size] = (num_tokens // size + num_rows) * (size + GATHER_COST)
    return min(costs, key=lambda size: (costs[size], -size))


def _tiles(step: _Step, row: torch.Tensor, first: torch.Tensor, tile_query: int, *, in_order: bool) -> list[AttentionTiles]:
    """Index the tiles, in slices that bound the scratch memory. row, first: [W]. in_order: the queries are the first tokens of the step."""
    num_keys = step.max_seq_len if step.window is None else min(step.max_seq_len, step.window + tile_query - 1)
    scores = tile_query * num_keys * (step.group_size if tile_query > 1 else 1)
    at_once = max(1, min(MAX_KEYS // num_keys, MAX_SCORES // scores))
    cuts = [*range(0, row.shape[0], at_once), row.shape[0]]
    return [_slice_tiles(step, row[a:b], first[a:b], tile_query, num_keys, a * tile_query if in_order else None) for a, b in pairwise(cuts)]


def _slice_tiles(
    step: _Step, row: torch.Tensor, first: torch.Tensor, tile_query: int, num_keys: int, first_token: int | None
) -> AttentionTiles:
    num_tiles = row.shape[0]
    seq_len, query_len = step.seq_len[row].long(), step.query_len[row].long()
    first_position = seq_len - query_len + first
    start = torch.zeros_like(first_position) if step.window is None else (first_position - (step.window - 1)).clamp_(min=0)
    offset = torch.arange(tile_query, device=row.device)
    query = first.unsqueeze(1) + offset
    real = query < query_len.unsqueeze(1)
    # A query that is not there sees its tile's first key, a real or a null one, so that its output is finite.
    position = torch.where(real, first_position.unsqueeze(1) + offset, start.unsqueeze(1))

    key = start.unsqueeze(1) + torch.arange(num_keys, device=row.device)
    page = step.block_table[row.unsqueeze(1), (key // step.tokens_per_page).clamp_(max=step.block_table.shape[1] - 1)].long()
    keys = torch.where(key < seq_len.unsqueeze(1), page * step.rows_per_page + key % step.tokens_per_page, 0)

    visible = key.unsqueeze(1) <= position.unsqueeze(2)
    if step.window is not None:
        visible &= key.unsqueeze(1) > position.unsqueeze(2) - step.window
    mask = torch.zeros(visible.shape, dtype=step.mask_dtype, device=row.device).masked_fill_(~visible, -torch.inf)
    if tile_query > 1:
        mask = mask.repeat_interleave(step.group_size, 1)
    queries: torch.Tensor | slice
    if first_token is not None:
        queries = slice(first_token, first_token + num_tiles * tile_query)
    else:
        queries = (step.query_start[row].unsqueeze(1) + query).clamp_(max=step.num_tokens - 1).flatten()
    return AttentionTiles(num_tiles, tile_query, keys.flatten(), mask.unsqueeze(1), queries)
