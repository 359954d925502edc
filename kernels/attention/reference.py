"""Attention over a paged cache (Vaswani et al. 2017, arXiv:1706.03762; pages: Kwon et al. 2023, arXiv:2309.06180) in plain torch.

`write_cache` and `paged_attention` are the specification. The `indexed_*` forms do the same from an `AttentionIndex`, so that a model of
many layers works the indices out once a step. Letters as in `index.py`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from modelrunner.kernels.attention.index import AttentionIndex, AttentionTiles, attention_index, rows_per_page, token_rows

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0


def write_cache(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *, scales: torch.Tensor | None = None) -> None:
    """Store keys and values, in place. cache: [num_pages, tokens_per_page, 2, HK, D]. k, v: [T, HK, D]. slots: [T] int64, -1: not written.

    scales: [2, HK] float32 above 0, of keys and of values: a head is kept divided by its scale. What float8_e4m3fn does not reach becomes
    its largest number, 448, with its sign (Micikevicius et al. 2022, arXiv:2209.05433). The null page is left all zeros.
    """
    tokens_per_page = cache.shape[1]
    used = slots.clamp(min=0)
    _write(cache, k, v, used // tokens_per_page * rows_per_page(cache) + used % tokens_per_page, scales)


def indexed_write(
    cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: AttentionIndex, *, scales: torch.Tensor | None = None
) -> None:
    """`write_cache` at the slots that `index` was made for."""
    _write(cache, k, v, index.write_rows, scales)


def _write(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Tokens that are not written go to the null page's first token, which is then made zero again: cheaper than masking k and v."""
    view, values = token_rows(cache), torch.cat((k.flatten(1), v.flatten(1)), 1)
    if scales is not None:
        values = (values.float().unflatten(1, (2, *k.shape[1:])) * scales.reciprocal().unsqueeze(-1)).flatten(1)
    if cache.dtype == E4M3:
        bits = values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).view(torch.uint8)
        view.view(torch.uint8).index_copy_(0, rows, bits)  # torch copies no 8-bit floats by index
    else:
        view.index_copy_(0, rows, values.to(cache.dtype))
    view[0].zero_()


def gather_pages(
    cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, *, max_tokens: int
) -> None:
    """Copy the keys and values of N rows out of their pages, token by token, for attention that reads contiguous memory.

    cache: [num_pages, tokens_per_page, 2, HK, D]. block_table: [N, P] int32. starts: [N+1] int32, ascending: a row's first token in out.
    lengths: [N] int32 tokens of each row, of which no more are copied than there is room for. Tokens between a row's last and the next
    row's first become zeros. max_tokens: bounds the distance of two starts. out: [S, 2, HK, D], contiguous; changed up to starts[N]. It may
    have another type than the cache, which then holds all of the cache's numbers.
    """
    token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=lengths.shape[0] - 1)
    place = token - starts[row]
    there = place < lengths[row]
    page_tokens = cache.shape[1]
    page = block_table[row, torch.where(there, place // page_tokens, 0)]
    source = torch.where(there, page.long() * rows_per_page(cache) + place % page_tokens, 0)
    copied = token_rows(cache).index_select(0, source).view(out.shape)
    copied = torch.where(there.view(-1, 1, 1, 1), copied, torch.zeros_like(copied)).to(out.dtype)
    out.copy_(torch.where((token < starts[-1]).view(-1, 1, 1, 1), copied, out))


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
    """Causal attention of the step's tokens to their rows' cached keys and values; the step's own are already written.

    q: [T, H, D]. cache: [num_pages, tokens_per_page, 2, HK, D]; unused slots may hold anything. The rest as in `attention_index`.
    positions: [T] int64, of each token in its row (implied by the lengths; kernels may prefer to read them).
    scale: factor on q.k. softcap: scores become softcap * tanh(scores / softcap). window: tokens that a query sees, itself included.
    sinks: [H], for each head the score of one more key, which has no value: it takes weight away from the others (attention sinks, Xiao et
    al. 2023, arXiv:2309.17453, learned as in gpt-oss). Neither scaled nor capped. scales: those that the cache was written with.
    Returns [T, H, D] in q's dtype; invalid tokens get finite values.
    """
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


def indexed_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    index: AttentionIndex,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` of the step that `index` was made for. q: [T, H, D]. Returns [T, H, D] in q's dtype."""
    view = token_rows(cache)
    parts = [_attend(q, view, index.num_kv_heads, tiles, scale, softcap, sinks, scales) for tiles in index.tiles]
    if not parts:
        return torch.zeros_like(q)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if index.places is None:
        return out
    if index.decode_tokens == 0:
        return out.index_select(0, index.places)
    return torch.cat((out[: index.decode_tokens], out[index.decode_tokens :].index_select(0, index.places)))


def _attend(
    q: torch.Tensor,
    view: torch.Tensor,
    num_kv_heads: int,
    tiles: AttentionTiles,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of some tiles, [W * Q, H, D]. The query heads that share a key head are rows of one product."""
    heads, dim = q.shape[1:]
    num, queries, group = tiles.num_tiles, tiles.tile_query, heads // num_kv_heads
    kv = view.index_select(0, tiles.keys).view(num, -1, 2, num_kv_heads, dim)
    if scales is not None:
        kv = kv.float() * scales.unsqueeze(-1)
    elif kv.dtype != q.dtype:
        kv = kv.to(q.dtype)
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    if isinstance(tiles.queries, slice):
        part = q if tiles.queries == slice(0, q.shape[0]) else q[tiles.queries]
    else:
        part = q.index_select(0, tiles.queries)
    if queries == 1:
        folded = part.reshape(num, num_kv_heads, group, dim)
    else:
        folded = part.reshape(num, queries, num_kv_heads, group, dim).transpose(1, 2).reshape(num, num_kv_heads, queries * group, dim)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded.to(k.dtype), k, v, attn_mask=tiles.mask.to(k.dtype), scale=scale).to(q.dtype)
    else:
        scores = torch.matmul(folded.float() * scale, k.float().transpose(2, 3))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        weights = _weights(scores.add_(tiles.mask), queries, sinks)
        out = torch.matmul(weights, v.float()).to(q.dtype)
    if queries == 1:
        return out.reshape(num, heads, dim)
    return out.reshape(num, num_kv_heads, queries, group, dim).transpose(1, 2).reshape(num * queries, heads, dim)


def _weights(scores: torch.Tensor, queries: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys, with each head's sink among them. scores: [W, HK, Q * G, S] float32. Returns the same shape."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.float().view(1, scores.shape[1], 1, -1).expand(scores.shape[0], -1, queries, -1).reshape(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
