"""Cases for the operations of speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from modelrunner.testing.conformance.kernel_cases import Draw

VOCAB = 31
LONGEST = 120


class Rows:
    """A table of N + 3 rows, and a step over N of them: decode rows with drafts, a chunk that samples and one that does not, dead rows, and
    some that share the scratch row. The first row decodes, and goes on."""

    def __init__(self, draw: Draw, n: int, drafts: int) -> None:
        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return draw.integers(low, high, *shape, dtype=torch.int32)

        lines, device = n + 3, draw.device
        self.rows = torch.randperm(lines - 1, generator=draw.generator)[:n].to(device).int()
        self.rows[n - n // 4 :] = lines - 1
        self.known = integers(1, LONGEST // 2, lines)
        first = self.rows[:1].long()
        self.known[first] = 9
        own = self.known[self.rows.long()]
        pending = torch.minimum(integers(1, 9, n) ** (integers(0, 4, n) == 0).int(), own)
        pending[0] = 1
        self.computed = own - pending
        chunk = torch.minimum(pending, integers(1, 9, n))
        self.query_len = torch.where(chunk == pending, pending + integers(0, 1 + drafts, n), chunk)
        self.query_len[1 :: max(n // 3, 2)] = 0
        self.query_len[n - n // 4 :] = 0
        self.computed[self.query_len == 0] = 0
        self.samples = (self.query_len > 0) & (chunk == pending)
        slots = torch.maximum(self.query_len, self.query_len.new_ones(())) + 1
        self.query_start = torch.cat((slots[:1] * 0, slots.cumsum(0).int()))
        self.limit = self.known + integers(1, 9, lines)
        self.finished = integers(0, 3, lines) // 2
        self.finished[first] = 0
        self.token_ids = integers(1, VOCAB, lines, LONGEST)
        self.wants = self.samples & (integers(0, 4, n) > 0)
        self.wants[0] = True

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, position and validity of each token."""
        total = int(self.query_start[-1]) + 2
        token = torch.arange(total, device=self.rows.device)
        row = torch.searchsorted(self.query_start[1:].long(), token, right=True).clamp_(max=self.rows.shape[0] - 1)
        offset = token - self.query_start[row]
        valid = offset < self.query_len[row]
        return row, torch.where(valid, self.computed[row] + offset, 0), valid


def spread_rows(ops: Any, draw: Draw, n: int, drafts: int) -> Any:
    made, slots = Rows(draw, n, drafts), 1 + drafts
    live = torch.zeros(n * slots, dtype=torch.bool, device=draw.device)
    rows, computed, query_len, ahead = (draw.unwritten(n * slots, dtype=torch.int32) for _ in range(4))
    out = [rows, live, computed, query_len, ahead, draw.unwritten(n, dtype=torch.int32)]
    ops.spread_rows(made.rows, made.query_len, made.samples, made.computed, made.known, slots, *out)
    return out


def store_drafts(ops: Any, draw: Draw, n: int, drafts: int) -> Any:
    made = Rows(draw, n, drafts)
    proposed = draw.integers(-1, VOCAB + 1, n, drafts, dtype=torch.int32)
    num_drafts = draw.integers(0, 5, made.known.shape[0], dtype=torch.int32)
    ops.store_drafts(made.rows, made.query_len, made.wants, proposed, VOCAB, made.known, made.limit, made.token_ids, num_drafts)
    return made.token_ids, num_drafts, made.known


def draft_inputs(ops: Any, draw: Draw, n: int, drafts: int) -> Any:
    made = Rows(draw, n, drafts)
    row, positions, valid = made.tokens()
    wants = torch.zeros(n, dtype=torch.bool, device=draw.device)
    rows = [draw.unwritten(n, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int64)]
    tokens = [draw.unwritten(positions.shape[0], dtype=torch.int64) for _ in range(2)]
    ops.draft_inputs(
        *(made.rows, made.query_start, made.query_len, made.samples, made.computed, row, positions, valid),
        *(made.known, made.finished, made.token_ids, drafts, LONGEST // 3, wants, *rows, *tokens),
    )
    return wants, rows, tokens


def draft_pass(ops: Any, draw: Draw, n: int, groups: int) -> Any:
    made = Rows(draw, n, 2)
    known = made.known[made.rows.long()]
    given = []
    for size in (4, 16)[:groups]:
        table = draw.integers(0, 5, n, -(-LONGEST // size), dtype=torch.int32)
        given.append((table, size, draw.unwritten(n, dtype=torch.int64)))
    found = []
    for index in range(3):
        lengths = [draw.unwritten(n, dtype=torch.int32) for _ in range(3)]
        positions, valid = draw.unwritten(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool, device=draw.device)
        ops.draft_pass(made.rows, made.wants, known, made.limit, index, given, *lengths, positions, valid)
        found.append((lengths, positions, valid, [slots.clone() for *_, slots in given]))
    return found


def ngram_draft(ops: Any, draw: Draw, n: int, drafts: int, length: int) -> Any:
    """Texts of few different tokens, which repeat themselves; some rows are too short to."""
    lines = n + 2
    token_ids = draw.integers(0, 3, lines, length, dtype=torch.int32)
    token_ids[:, length // 2 :] = token_ids[:, : length - length // 2]
    rows = torch.randperm(lines, generator=draw.generator)[:n].to(draw.device).int()
    known = draw.integers(1, length + 1, n, dtype=torch.int32)
    known[0] = 1
    wants = draw.integers(0, 4, n) > 0
    found = []
    for low, high in ((1, 1), (2, 4), (3, 8)):
        out = torch.full((n, drafts), -1, dtype=torch.int32, device=draw.device)
        ops.ngram_draft(rows, wants, known, token_ids, length, low, high, out)
        found.append(out)
    return found


SPECULATION_CASES: dict[str, tuple[Any, Any]] = {
    "spread_rows": (spread_rows, ((1, 1), (7, 3), (150, 4))),
    "store_drafts": (store_drafts, ((1, 1), (9, 3), (150, 5), (6, 0))),
    "draft_inputs": (draft_inputs, ((1, 1), (9, 3), (150, 2))),
    "draft_pass": (draft_pass, ((1, 1), (9, 0), (150, 1), (9, 2))),
    "ngram_draft": (ngram_draft, ((1, 1, 9), (7, 3, 60), (5, 5, 5000))),
}
