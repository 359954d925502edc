"""Byte automata in Triton: a lane walks the bytes of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl

TOKENS = 1024  # whose bits a program makes
WORDS = 1024  # of a mask that are looked at together
ROWS = 32  # of a program that walks


@triton.jit
def _lead(state, going, start, length, edges, token_bytes):
    """The states after the bytes of tokens, -1 where they lead nowhere. going: lanes that walk at all; the others keep their state."""
    place = 0
    left = tl.max((going & (length > 0)).to(tl.int32), 0)
    while left > 0:
        on = going & (place < length) & (state >= 0)
        byte = tl.load(token_bytes + start + place, mask=on, other=0).to(tl.int64)
        to = tl.load(edges + state.to(tl.int64) * 256 + byte, mask=on, other=-1).to(tl.int32)
        state = tl.where(on, to, state)
        place += 1
        left = tl.max((going & (place < length) & (state >= 0)).to(tl.int32), 0)
    return state


@triton.jit(do_not_specialize=["first", "vocab"])
def _mask_states(first, edges, token_start, token_bytes, masks, vocab, words, TOKENS: tl.constexpr):
    """Program (s, b): the bits of TOKENS tokens of one state."""
    state = first + tl.program_id(0)
    ids = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    some = ids < vocab
    start = tl.load(token_start + ids, mask=some, other=0)
    length = tl.load(token_start + ids + 1, mask=some, other=0) - start
    after = _lead(tl.zeros_like(ids) + state, some, start, length, edges, token_bytes)
    bits = (some & (length > 0) & (after >= 0)).to(tl.int32) << (ids % 32)
    word = tl.program_id(1) * (TOKENS // 32) + tl.arange(0, TOKENS // 32)
    tl.store(masks + state.to(tl.int64) * words + word, tl.sum(tl.reshape(bits, [TOKENS // 32, 32]), 1), mask=word < words)


@triton.jit(do_not_specialize=["first"])
def _close_states(first, accepting, stops, masks, closed, words, WORDS: tl.constexpr):
    """Program s: whether the output ends in a state; the bits of the ids that end it."""
    state = (first + tl.program_id(0)).to(tl.int64)
    ends = tl.load(accepting + state) != 0
    line = masks + state * words
    leads = 0
    for begin in range(0, words, WORDS):
        word = begin + tl.arange(0, WORDS)
        bits = tl.load(line + word, mask=word < words, other=0)
        leads |= tl.max((bits != 0).to(tl.int32), 0)
        more = tl.load(stops + word, mask=word < words, other=0)
        tl.store(line + word, bits | more, mask=word < tl.where(ends, words, 0))
    tl.store(closed + state, (ends & (leads == 0)).to(tl.uint8))


@triton.jit(do_not_specialize=["num_rows"])
def _walk_tokens(
    rows, samples, ok, tokens, num_tokens, states, edges, closed, token_start, token_bytes, stops, ends, num_rows, stride, vocab,
    K1: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = n < num_rows
    if PDL:
        gdc_wait()
    row = tl.load(rows + n, mask=some, other=0).to(tl.int64)
    state = tl.load(states + row, mask=some, other=-1)
    going = some & (state >= 0) & (tl.load(samples + n, mask=some, other=0) != 0) & (tl.load(ok + n, mask=some, other=0) != 0)
    count = tl.full([ROWS], K1, tl.int32)
    if num_tokens is not None:
        count = tl.load(num_tokens + n, mask=some, other=0)
    end = tl.zeros([ROWS], tl.int32)
    for at in tl.static_range(K1):
        counts = going & (at < count) & (end == 0)
        token = tl.load(tokens + n.to(tl.int64) * stride + at, mask=counts, other=0)
        token = tl.minimum(tl.maximum(token, 0), vocab - 1)
        start = tl.load(token_start + token, mask=counts, other=0)
        length = tl.load(token_start + token + 1, mask=counts, other=0) - start
        after = _lead(state, counts, start, length, edges, token_bytes)
        state = tl.where(counts & (after >= 0), after, state)
        stop = (tl.load(stops + token // 32, mask=counts, other=0) >> (token % 32).to(tl.int32)) & 1
        over = tl.load(closed + state, mask=counts, other=0).to(tl.int32)
        end = tl.where(counts & ((stop | over) != 0), at + 1, end)
    tl.store(states + row, state, mask=going)
    tl.store(ends + n, end, mask=some)


@triton.jit(do_not_specialize=["num_rows"])
def _draft_states(
    rows, samples, computed, query_len, token_ids, longest, states, edges, token_start, token_bytes, out, num_rows, vocab,
    K1: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program, each of K1 lines."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = n < num_rows
    line = n.to(tl.int64) * K1
    if PDL:
        gdc_wait()
    row = tl.load(rows + line, mask=some, other=0).to(tl.int64)
    first = tl.load(computed + line, mask=some, other=0) + tl.load(query_len + line, mask=some, other=0)
    drafts = token_ids + row * longest + first
    state = tl.load(states + row, mask=some, other=-1)
    for at in tl.static_range(K1):
        counts = some & (tl.load(samples + line + at, mask=some, other=0) != 0)
        state = tl.where(counts, state, -1)
        tl.store(out + line + at, state, mask=some)
        if at + 1 < K1:
            goes = state >= 0
            more = goes & (tl.load(samples + line + at + 1, mask=goes, other=0) != 0)
            token = tl.minimum(tl.maximum(tl.load(drafts + at, mask=more, other=0), 0), vocab - 1)
            start = tl.load(token_start + token, mask=more, other=0)
            length = tl.load(token_start + token + 1, mask=more, other=0) - start
            leads = more & (length > 0)
            state = tl.where(leads, _lead(state, leads, start, length, edges, token_bytes), -1)


def mask_states(
    first: int,
    count: int,
    edges: torch.Tensor,
    accepting: torch.Tensor,
    token_start: torch.Tensor,
    token_bytes: torch.Tensor,
    longest: int,
    stops: torch.Tensor,
    masks: torch.Tensor,
    closed: torch.Tensor,
) -> None:
    """See the reference: two launches."""
    vocab, words = token_start.shape[0] - 1, masks.shape[1]
    if count:
        grid = (count, triton.cdiv(words * 32, TOKENS))
        _mask_states[grid](first, edges, token_start, token_bytes, masks, vocab, words, TOKENS, num_warps=4)
        _close_states[(count,)](first, accepting, stops, masks, closed, words, WORDS, num_warps=4)


def walk_tokens(
    rows: torch.Tensor,
    samples: torch.Tensor,
    ok: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor | None,
    states: torch.Tensor,
    edges: torch.Tensor,
    closed: torch.Tensor,
    token_start: torch.Tensor,
    token_bytes: torch.Tensor,
    longest: int,
    stops: torch.Tensor,
) -> torch.Tensor:
    """See the reference: one launch."""
    (n, width), ends = tokens.shape, torch.empty_like(rows)
    if n == 0:
        return ends
    if width > 1 and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    _walk_tokens[(triton.cdiv(n, ROWS),)](
        rows, samples, ok, tokens, num_tokens, states, edges, closed, token_start, token_bytes, stops, ends,
        n, tokens.stride(0), token_start.shape[0] - 1, width, ROWS, num_warps=1, **pdl(rows),
    )  # fmt: skip
    return ends


def draft_states(
    rows: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    query_len: torch.Tensor,
    token_ids: torch.Tensor,
    slots: int,
    states: torch.Tensor,
    edges: torch.Tensor,
    token_start: torch.Tensor,
    token_bytes: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """See the reference: one launch."""
    n, found = rows.shape[0] // slots, torch.empty_like(rows)
    if n:
        _draft_states[(triton.cdiv(n, ROWS),)](
            rows, samples, computed, query_len, token_ids, token_ids.stride(0), states, edges, token_start, token_bytes, found,
            n, token_start.shape[0] - 1, slots, ROWS, num_warps=1, **pdl(rows),
        )  # fmt: skip
    return found
