"""Cases for the operations on byte automata: states that lead nowhere, tokens without bytes, stop ids, rows without an automaton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LETTERS = 5  # bytes that the tokens consist of, so that walks go on for a while
LONGEST = 9


@dataclass
class World:
    """A vocabulary and an arena of random automata; most edges of letters lead somewhere."""

    edges: torch.Tensor
    accepting: torch.Tensor
    token_start: torch.Tensor
    token_bytes: torch.Tensor
    stops: torch.Tensor

    @classmethod
    def made(cls, draw: Any, states: int, vocab: int) -> World:
        edges = draw.integers(-1, states, states, 256, dtype=torch.int16)
        edges[:, LETTERS:] = -1
        edges[0] = -1  # a state without a way on
        lengths = draw.integers(0, LONGEST + 1, vocab, dtype=torch.int32)
        stops = draw.integers(0, 8, vocab) == 0
        lengths[stops | (draw.integers(0, 8, vocab) == 0)] = 0
        start = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
        text = draw.integers(0, LETTERS, int(start[-1]) + 3, dtype=torch.uint8)
        words = max(2, -(-vocab // 32))
        bits = torch.nn.functional.pad(stops, (0, words * 32 - vocab)).unflatten(0, (words, 32)).to(torch.int32)
        lines = (bits << torch.arange(32, device=draw.device, dtype=torch.int32)).sum(1, dtype=torch.int32)
        return cls(edges, draw.integers(0, 2, states, dtype=torch.uint8), start, text, lines)


def mask_states(ops: Any, draw: Any, states: int, vocab: int) -> Any:
    """All states but the first two and the last one, whose lines stay as they are."""
    made = World.made(draw, states, vocab)
    made.edges[3], made.accepting[3] = -1, 1  # an output ends here
    masks = draw.unwritten(states + 1, made.stops.shape[0], dtype=torch.int32)
    closed = torch.full_like(made.accepting, 9)
    text = (made.token_start, made.token_bytes, LONGEST, made.stops)
    ops.mask_states(2, states - 3, made.edges, made.accepting, *text, masks, closed)
    return masks, closed


def walk_tokens(ops: Any, draw: Any, rows: int, draft: int) -> Any:
    """draft: tokens of a row beside the first. Rows that do not sample, are not ok or have no automaton stay where they are."""
    states, vocab = 40, 300
    made = World.made(draw, states, vocab)
    own = torch.randperm(rows + 3, generator=draw.generator)[:rows].to(draw.device, torch.int32)
    at = draw.integers(-1, states, rows + 3, dtype=torch.int32)
    samples, ok = draw.integers(0, 4, rows) > 0, draw.integers(0, 4, rows) > 0
    tokens = draw.integers(0, vocab, rows, 1 + draft)
    closed = (draw.integers(0, 6, states) == 0).to(torch.uint8)
    counts = draw.integers(0, 2 + draft, rows, dtype=torch.int32)
    text = (made.token_start, made.token_bytes, LONGEST, made.stops)
    every, some = at.clone(), at.clone()
    ends = ops.walk_tokens(own, samples, ok, tokens, None, every, made.edges, closed, *text)
    earlier = ops.walk_tokens(own, samples, ok, tokens, counts, some, made.edges, closed, *text)
    return every, some, ends, earlier


def draft_states(ops: Any, draw: Any, rows: int, slots: int) -> Any:
    """Drafts that lead on and those that do not, rows with fewer than slots, without a sample, without an automaton."""
    states, vocab, longest = 40, 300, 12 + slots
    made = World.made(draw, states, vocab)
    made.edges[1:, :LETTERS] = draw.integers(0, states, states - 1, LETTERS, dtype=torch.int16)
    own = torch.randperm(rows + 3, generator=draw.generator)[:rows].to(draw.device, torch.int32)
    at = draw.integers(-1, states, rows + 3, dtype=torch.int32)
    kept, ahead = at.clone(), torch.arange(slots, dtype=torch.int32, device=draw.device).repeat(rows)
    samples = (ahead.view(rows, slots) < draw.integers(0, slots + 1, rows).unsqueeze(1)).flatten()
    known = draw.integers(1, longest - slots, rows, dtype=torch.int32).repeat_interleave(slots)
    query_len = draw.integers(1, 3, rows, dtype=torch.int32).repeat_interleave(slots) + ahead
    token_ids = draw.integers(0, vocab, rows + 3, longest, dtype=torch.int32)
    lines = (own.repeat_interleave(slots), samples, known + ahead - query_len, query_len)
    found = ops.draft_states(*lines, token_ids, slots, at, made.edges, made.token_start, made.token_bytes, LONGEST)
    return found, at == kept


AUTOMATA_CASES: dict[str, tuple[Any, Any]] = {
    "draft_states": (draft_states, ((1, 2), (50, 4), (40, 1), (33, 6))),
    "mask_states": (mask_states, ((5, 31), (9, 300), (4, 1100))),
    "walk_tokens": (walk_tokens, ((1, 0), (50, 0), (40, 3))),
}
