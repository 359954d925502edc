"""Byte automata in plain torch (see `modelrunner.automaton`).

A states in the arena, V vocabulary size, B bytes of all tokens, N rows of the step, R rows of the request table, L longest request, k draft
tokens.
edges: [A, 256] int16, the next state for each byte, or -1. token_start: [V + 1] int32, where each token's bytes begin in token_bytes [B]
uint8; a token without bytes is in no language. stops: [ceil(V / 32)] int32, bitmask of the ids that end an output; they have no bytes.
"""

from __future__ import annotations

import torch

BITS = 32  # tokens in a word of a mask
CHUNK = 16  # states whose masks are made at a time
NO_STATE = -1


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
    """Write the masks of the states first .. first + count - 1, and whether an output ends in them.

    accepting: [A] uint8, 1 where an output may end. longest: bytes of the longest token. masks: [A + 1, ceil(V / 32)] int32, changed: bit
    v % 32 of word v // 32 is set where the bytes of token v lead to a state; those of `stops` too if the state is accepting. closed: [A]
    uint8, changed: 1 where the state is accepting and no token leads on.
    """
    start, vocab, words = token_start[:-1].long(), token_start.shape[0] - 1, masks.shape[1]
    length = token_start[1:] - token_start[:-1]
    for begin in range(first, first + count, CHUNK):
        end = min(begin + CHUNK, first + count)
        state = torch.arange(begin, end, device=masks.device).unsqueeze(1).expand(-1, vocab)
        for place in range(longest):
            byte = token_bytes[(start + place).clamp_(max=token_bytes.shape[0] - 1)].long()
            to = edges[state.clamp(min=0), byte].long()
            state = torch.where((place < length) & (state >= 0), to, state)
        leads = (state >= 0) & (length > 0)
        bits = torch.nn.functional.pad(leads, (0, words * BITS - vocab)).unflatten(1, (words, BITS)).to(torch.int32)
        lines = (bits << torch.arange(BITS, device=masks.device, dtype=torch.int32)).sum(2, dtype=torch.int32)
        ends = accepting[begin:end] != 0
        closed[begin:end] = (ends & ~leads.any(1)).to(closed.dtype)
        masks[begin:end] = lines | torch.where(ends.unsqueeze(1), stops, 0)


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
    """Go on by the bytes of what was sampled. Returns ends [N] int32: how many of a row's tokens make its output complete, 0 if none does.

    rows: [N] int32. samples, ok: [N] bool; a row for which either is False goes nowhere. tokens: [N, 1 + k] int64, of which the first
    num_tokens [N] int32 count (None: all). states: [R] int32, changed: each row's state, -1 for a row without an automaton; where a token
    leads nowhere, the row keeps the state before it. closed: [A] uint8: an output that comes to such a state is complete, and so is one
    with a token of `stops`, which leads nowhere.
    """
    row = rows.long()
    state, ends = states[row].long(), torch.zeros_like(rows)
    going = samples & ok & (state >= 0)
    for at in range(tokens.shape[1]):
        token = tokens[:, at].clamp(0, token_start.shape[0] - 2)
        counts = going if num_tokens is None else going & (at < num_tokens)
        counts = counts & (ends == 0)
        start, stop = token_start[token].long(), token_start[token + 1].long()
        to = state
        for place in range(longest):
            byte = token_bytes[(start + place).clamp(max=token_bytes.shape[0] - 1)].long()
            to = torch.where((start + place < stop) & (to >= 0), edges[to.clamp(min=0), byte].long(), to)
        state = torch.where(counts & (to >= 0), to, state)
        over = (stops[token // BITS] >> (token % BITS).to(torch.int32)) & 1 != 0
        ends = torch.where(counts & (over | (closed[state.clamp(min=0)] != 0)), at + 1, ends)
    states[row] = torch.where(going, state.to(states.dtype), states[row])
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
    """The state of each line of a step with drafts: the row's own one, gone on by the bytes of the drafts ahead of the line.

    A row has S = slots = 1 + k lines. rows, samples, computed, query_len: [N * S], of lines, and token_ids [R, L] int32, as in
    `verify_drafts`. states: [R] int32, not changed: a row's own state follows the tokens that are kept (see `walk_tokens`).
    Returns [N * S] int32: -1, which stands for no mask, where the row has no automaton or the line does not count, and behind a draft that
    leads nowhere: such a draft is not kept, so what its line says is not looked at.
    """
    lines = [each.view(-1, slots) for each in (rows, samples, computed + query_len)]
    row, counting, first = lines[0][:, 0].long(), lines[1], lines[2][:, 0].long()
    state, found = states[row].long(), []
    for at in range(slots):
        state = torch.where(counting[:, at], state, NO_STATE)
        found.append(state)
        token = token_ids[row, (first + at).clamp(max=token_ids.shape[1] - 1)].clamp(0, token_start.shape[0] - 2).long()
        start, stop = token_start[token].long(), token_start[token + 1].long()
        state = torch.where(start < stop, state, NO_STATE)
        for place in range(longest):
            byte = token_bytes[(start + place).clamp(max=token_bytes.shape[0] - 1)].long()
            state = torch.where((start + place < stop) & (state >= 0), edges[state.clamp(min=0), byte].long(), state)
    return torch.stack(found, 1).flatten().to(states.dtype)
