"""Cases for the operations that edit logits: rows with and without seats, in another order than their lines, lists that overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LONGEST, ENTRIES, WORDS, WORD_TOKENS = 40, 5, 6, 3


@dataclass
class Table:
    """Columns of a request table with rows and seats of which every other one is taken; `own` are the step's rows."""

    own: torch.Tensor
    known: torch.Tensor
    prompt_len: torch.Tensor
    token_ids: torch.Tensor
    seats: torch.Tensor
    num_seats: int

    @classmethod
    def made(cls, draw: Any, rows: int, vocab: int) -> Table:
        lines = rows + 3
        prompt_len = draw.integers(1, 20, lines, dtype=torch.int32)
        known = prompt_len + draw.integers(0, 20, lines, dtype=torch.int32)
        token_ids = draw.integers(0, vocab, lines, LONGEST, dtype=torch.int32)
        token_ids[torch.arange(LONGEST, device=draw.device) >= known.unsqueeze(1)] = -9  # nobody has written them
        seats = torch.full((lines,), -1, dtype=torch.int32, device=draw.device)
        chosen = torch.randperm(lines, generator=draw.generator).to(draw.device)
        seats[chosen[::2]] = torch.arange(len(chosen[::2]), dtype=torch.int32, device=draw.device)
        own = torch.randperm(lines, generator=draw.generator)[:rows].to(draw.device, torch.int32)
        return cls(own, known, prompt_len, token_ids, seats, len(chosen[::2]))

    def lists(self, draw: Any, vocab: int, *shape: int) -> torch.Tensor:
        """A line of ids for each seat, some of them none, and the line of defaults."""
        made: torch.Tensor = draw.integers(-max(vocab // 3, 1), vocab, self.num_seats + 1, *shape, dtype=torch.int32).clamp(min=-1)
        made[-1] = -1
        return made


def count_tokens(ops: Any, draw: Any, rows: int, vocab: int) -> Any:
    """Rows counted for the first time, on another's leavings; then again, when they know more tokens."""
    table = Table.made(draw, rows, vocab)
    counts = draw.integers(0, 9, table.num_seats + 1, vocab, dtype=torch.int32)
    counts[-1] = 0
    counted = torch.zeros_like(table.known)
    samples = draw.uniform(rows) > 0.3
    common = (table.seats, counted, table.prompt_len)
    ops.count_tokens(table.own, samples, *common, (table.known - 1).clamp(min=1), table.token_ids, counts)
    first = counts.clone(), counted.clone()
    ops.count_tokens(table.own, samples, *common, table.known, table.token_ids, counts)
    return *first, counts, counted


def edit_logits(ops: Any, draw: Any, rows: int, vocab: int, parts: str, slots: int = 1) -> Any:
    """parts: a letter for each of allow list, bias, stop ids, bad words, penalties and masks of automata. slots: lines of a row, each with
    one draft more."""
    table = Table.made(draw, rows, vocab)
    logits = draw.noise(rows * slots, vocab + 3)[:, :vocab]
    kept, lines = logits.clone(), table.known.shape[0]
    places = torch.argsort(torch.rand(table.num_seats + 1, max(vocab, ENTRIES), generator=draw.generator), 1)[:, :ENTRIES]
    ids = torch.where(places < vocab, places, -1).to(draw.device, torch.int32)  # each at most once in a line
    ids[-1] = -1
    values = (draw.uniform(table.num_seats + 1, ENTRIES) * 8 - 4).view(torch.int32)
    words = table.lists(draw, vocab, WORDS, WORD_TOKENS)
    _lead(words, table)
    for line, known in enumerate(table.known.tolist()):  # drafts, of which the last one may be another sequence's beginning, or repeat
        table.token_ids[line, known : known + slots - 1] = table.token_ids[line, known - 1]
    counts = draw.integers(0, 9, table.num_seats + 1, vocab, dtype=torch.int32)
    counts[-1] = 0
    factors = (0.5 + draw.uniform(lines), 2 * draw.uniform(lines) - 1, 2 * draw.uniform(lines) - 1)
    given = {
        "a": (table.seats, draw.integers(-(2**31), 2**31, table.num_seats + 1, max(2, -(-vocab // 32)), dtype=torch.int32)),
        "b": (table.seats, torch.cat((ids, values), 1)),
        "s": (table.seats, table.lists(draw, vocab, ENTRIES), table.known + draw.integers(-1, 2, lines, dtype=torch.int32)),
        "w": (table.seats, words),
        "p": (table.seats, counts, *factors),
        "m": states_of(draw, lines, vocab),
    }
    chosen = [value if name in parts else None for name, value in given.items()]
    rows_of_lines = table.own.repeat_interleave(slots)
    ahead = [] if slots == 1 else [torch.arange(slots, dtype=torch.int32, device=draw.device).repeat(rows)]
    edited = ops.edit_logits(logits, rows_of_lines, table.known, table.prompt_len, table.token_ids, *chosen, *ahead)
    return edited, logits - kept


def states_of(draw: Any, lines: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A state for some rows, several of them in the same one, and the masks of four states."""
    masks = draw.integers(-(2**31), 2**31, 5, max(2, -(-vocab // 32)), dtype=torch.int32)
    return draw.integers(-1, 4, lines, dtype=torch.int32), masks


def mask_logits(ops: Any, draw: Any, rows: int, vocab: int, parts: str) -> Any:
    """In place, with what lies beside the logits. parts: with `l`, states of the lines."""
    table, wide = Table.made(draw, rows, vocab), draw.noise(rows, vocab + 3)
    masks = draw.integers(-(2**31), 2**31, table.num_seats + 1, max(2, -(-vocab // 32)), dtype=torch.int32)
    allowed, automata = (table.seats, masks), states_of(draw, table.known.shape[0], vocab)
    if "l" in parts:
        ops.mask_logits(wide[:, :vocab], None, None, states_of(draw, rows, vocab))
    else:
        ops.mask_logits(wide[:, :vocab], table.own, allowed if "a" in parts else None, automata if "m" in parts else None)
    return wide


def _lead(words: torch.Tensor, table: Table) -> None:
    """Let some sequences be what their row's tokens lead to: the whole of one, and one that would need a token of the prompt."""
    for row, seat in enumerate(table.seats.tolist()):
        if seat < 0:
            continue
        known = int(table.known[row])
        words[seat, 0, :2] = table.token_ids[row, max(known - 2, 0) : known][-2:]
        words[seat, 1, :] = torch.tensor([-1, int(table.token_ids[row, known - 1]), 0], dtype=torch.int32)
        words[seat, 2, :] = torch.tensor([-1, -1, 0], dtype=torch.int32)


SIZES = ((1, 5), (5, 70), (4, 4100))
PARTS = ("abswp", "a", "b", "s", "w", "p", "bp", "m", "abswpm")
LOGITS_CASES: dict[str, tuple[Any, Any]] = {
    "count_tokens": (count_tokens, SIZES),
    "edit_logits": (
        edit_logits,
        (
            *((*size, parts) for size in SIZES[1:] for parts in PARTS),
            *((5, 70, parts, 3) for parts in ("abswp", "a", "p", "bp", "abswpm")),
        ),
    ),
    "mask_logits": (mask_logits, tuple((*size, parts) for size in SIZES for parts in ("a", "m", "am", "l"))),
}
