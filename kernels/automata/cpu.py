"""Byte automata on CPUs, which need not go on with what leads nowhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.kernels.automata.reference import BITS, NO_STATE


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
    """See the reference: state by state, with ever fewer tokens."""
    starts, text, table = token_start.numpy(), token_bytes.numpy(), edges.numpy()
    ids = np.flatnonzero(starts[1:] > starts[:-1])
    begins, ends = starts[:-1][ids], starts[1:][ids]
    bits = np.empty(masks.shape[1] * BITS, np.bool_)
    for state in range(first, first + count):
        token, place, end = ids, begins, ends
        at = np.full(ids.size, state, np.int16)
        bits[:] = False
        while token.size:
            at = table[at, text[place]]
            place = place + 1
            alive = at >= 0
            bits[token[alive & (place == end)]] = True
            alive &= place < end
            token, place, end, at = token[alive], place[alive], end[alive], at[alive]
        line = np.packbits(bits, bitorder="little").view(np.int32)
        over = bool(accepting[state])
        closed[state] = over and not line.any()
        masks[state] = torch.from_numpy(line) | stops if over else torch.from_numpy(line)


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
    """See the reference: row by row, byte by byte."""
    ends = torch.zeros_like(rows)
    row, at, table, text = rows.numpy(), states.numpy(), edges.numpy(), token_bytes.numpy()
    going = np.flatnonzero(samples.numpy() & ok.numpy() & (at[row] >= 0))
    most = np.full(row.size, tokens.shape[1]) if num_tokens is None else num_tokens.numpy()
    for n in going.tolist():
        state = int(at[row[n]])
        for k, token in enumerate(tokens[n, : int(most[n])].tolist()):
            to = _lead(table, state, text[int(token_start[token]) : int(token_start[token + 1])])
            state = to if to >= 0 else state
            if closed[state] or int(stops[token // BITS]) >> token % BITS & 1:
                ends[n] = k + 1
                break
        at[row[n]] = state
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
    """See the reference: row by row, byte by byte."""
    found = torch.full_like(rows, NO_STATE)
    row, place, counts = rows[::slots].numpy(), (computed + query_len)[::slots].numpy(), samples.view(-1, slots).numpy()
    table, text, start, own = edges.numpy(), token_bytes.numpy(), token_start.numpy(), states.numpy()
    out, ids = found.view(-1, slots).numpy(), token_ids.numpy()
    for n in np.flatnonzero(own[row] >= 0).tolist():
        state = int(own[row[n]])
        for at in range(slots):
            if state < 0 or not counts[n, at]:
                break
            out[n, at] = state
            if at + 1 < slots and counts[n, at + 1]:
                token = min(max(int(ids[row[n], place[n] + at]), 0), start.size - 2)
                draft = text[start[token] : start[token + 1]]
                state = _lead(table, state, draft) if draft.size else NO_STATE
    return found


def _lead(edges: npt.NDArray[np.int16], state: int, text: npt.NDArray[np.uint8]) -> int:
    """The state after the bytes of a token, -1 where they lead nowhere."""
    for byte in text.tolist():
        if state < 0:
            break
        state = int(edges[state, byte])
    return state


OVERRIDES = {"draft_states": draft_states, "mask_states": mask_states, "walk_tokens": walk_tokens}
