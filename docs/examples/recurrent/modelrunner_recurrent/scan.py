"""The recurrence over paged states, in plain torch: the specification that a fast kernel would be measured against.

Dimension letters: T tokens and N rows of the step, H heads, D head size, R tokens that a page can replay.

A page holds the state before its token number `base`, that number, and key, value and decay of the tokens from `base` on, R of them at
most. A reader replays the ones that count. So the state needs one copy although up to R - 1 drafted tokens of a step may come to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_elements(heads: int, size: int, replay: int) -> int:
    """Elements of one layer's page: state [H, D, D], base [1], inputs [R, 3, H, D]."""
    return heads * size * size + 1 + replay * 3 * heads * size


def page_parts(cache: Tensor, heads: int, size: int, replay: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a layer's cache [pages, elements]: states [pages, H, D, D], bases [pages], inputs [pages, R, 3, H, D]."""
    states, bases, inputs = cache.split([heads * size * size, 1, replay * 3 * heads * size], 1)
    return states.unflatten(1, (heads, size, size)), bases.squeeze(1), inputs.unflatten(1, (replay, 3, heads, size))


def update(state: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """S <- diag(decay) S + key value^T (eq. 3 of the paper). state: [N, H, D, D]; the others: [N, H, D]."""
    return state * decay.unsqueeze(-1) + key.unsqueeze(-1) * value.unsqueeze(-2)


def gated_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    query_len: Tensor,
    seq_len: Tensor,
    *,
    interval: int,
    replay: int,
    max_query: int,
) -> Tensor:
    """S^T q for each token, S updated by the token itself; the rows' pages are left as `RecurrentState` says.

    q, k, v, decay: [T, H, D]. cache: [pages, page_elements] float32, written in place; page 0 stays zero. block_table: [N, pages] int32.
    query_start: [N+1], query_len, seq_len: [N] int32. interval: tokens a page. max_query: bound of query_len. Returns [T, H, D] in q's
    dtype; zeros for tokens of nobody.
    """
    num_tokens, heads, size = q.shape
    states, bases, inputs = page_parts(cache, heads, size, replay)
    table, end = block_table.long(), seq_len.long()
    first = end - query_len  # [N] tokens before the step
    rows = torch.arange(len(first), device=q.device)
    page = table[rows, (first - 1).clamp(min=0) // interval] * (first > 0)  # the null page is a state of zeros
    state, base, known = states[page], bases[page], inputs[page]
    for i in range(replay):
        state = torch.where(wide(base + i < first), update(state, *known[:, i].unbind(1)), state)
    queries, given = q.float(), torch.stack([k, v, decay], 1).float()  # [T, 3, H, D]
    out = torch.zeros(num_tokens + 1, heads, size, device=q.device)  # the last line is for tokens that are not there
    for i in range(max_query):
        live, at = i < query_len, first + i
        token = torch.where(live, query_start[:-1] + i, num_tokens)
        index = torch.where(live, at, 0) // interval
        page = table[rows, index] * live  # what is not to be written goes to the null page, as the zeros that are there
        base = torch.maximum(torch.maximum(first, index * interval), torch.minimum(end, (index + 1) * interval) - replay)
        token_inputs = given[token.clamp(max=num_tokens - 1)]
        begins, keeps = page * (at == base), page * (at >= base)
        states[begins] = torch.where(wide(begins > 0), state, 0.0)
        bases[begins] = torch.where(begins > 0, at, 0).float()
        inputs[keeps, (at - base).clamp(0, replay - 1)] = torch.where(wide(keeps > 0), token_inputs, 0.0)
        state = torch.where(wide(live), update(state, *token_inputs.unbind(1)), state)
        out[token] = torch.einsum("nhk,nhkv->nhv", queries[token.clamp(max=num_tokens - 1)], state)
    return out[:num_tokens].to(q.dtype)


def wide(mask: Tensor) -> Tensor:
    """[N] -> [N, 1, 1, 1]"""
    return mask.view(-1, 1, 1, 1)
