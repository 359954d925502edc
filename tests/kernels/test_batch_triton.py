"""The Triton operations that gather a step against their references, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton_world import DEVICE, agree, close, nan

from modelrunner.kernels.batch import reference
from modelrunner.kernels.batch.gpu import OVERRIDES
from modelrunner.plugins.fusions import gather_step as plain_gather_step

REFERENCES: dict[str, Callable[..., Any]] = {
    "gather_rows": reference.gather_rows,
    "gather_tokens": reference.gather_tokens,
    "gather_block_table": reference.gather_block_table,
    "slot_mapping": reference.slot_mapping,
    "gather_step": plain_gather_step(reference),
}
LONGEST = 3000


@pytest.mark.parametrize("op", OVERRIDES)
def test_conformance_cases(op: str) -> None:
    agree(op, OVERRIDES, REFERENCES)


def int32(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(DEVICE)


class World:
    """A table of which some rows have finished or changed hands, and a plan: query slots [N] per row, and `spare` tokens of nobody."""

    def __init__(self, rng: np.random.Generator, slots: np.ndarray[Any, Any], spare: int = 0) -> None:
        n = slots.size
        self.n, self.tokens = n, int(slots.sum()) + spare
        lines = n + 5
        known = rng.integers(1, LONGEST, lines)
        computed = (known - rng.integers(0, 12, lines)).clip(0)
        generation = rng.integers(0, 3, lines)
        rows = rng.permutation(lines)[:n]
        start = np.concatenate(([0], np.cumsum(slots)))
        tenancy = np.where(rng.random(n) < 0.9, generation[rows], 7)
        self.plan = [int32(rows), int32(slots), int32(tenancy), int32(start)]
        finished = rng.random(lines) < 0.1
        self.columns = [int32(value) for value in (computed, known, finished, generation, rng.integers(0, 4, lines))]
        self.token_ids = int32(rng.integers(0, 999, (lines, LONGEST + 4)))
        self.num_drafts = int32(rng.integers(0, 4, lines)) if n > 60 and (slots == 4).all() else None
        self.tables = {page: int32(rng.integers(0, 9, (lines, -(-(LONGEST + 4) // page)))) for page in (1, 7, 16)}

    def step(self, function: Callable[..., Any], pages: tuple[int, ...]) -> list[Any]:
        """Everything that `gather_step` writes; of the block tables what is needed, the rest being -1."""
        rows = [nan(self.n, dtype=dtype) for dtype in (*[torch.int32] * 3, torch.bool, torch.int32, torch.int64)]
        tokens = [nan(self.tokens, dtype=dtype) for dtype in (*[torch.int64] * 3, torch.bool)]
        groups = []
        for page in pages:
            table = torch.zeros(self.n, -(-(LONGEST + 4) // page), dtype=torch.int32, device=DEVICE)
            groups.append((self.tables[page], page, table, nan(self.tokens, dtype=torch.int64)))
        function(*self.plan, *self.columns, self.token_ids, *rows, *tokens, groups, self.num_drafts)
        needed = [(-(-rows[2] // page)).clamp(min=1).unsqueeze(1) for page in pages]
        kept = [
            torch.where(torch.arange(table.shape[1], device=DEVICE) < limit, table, -1)
            for (_, _, table, _), limit in zip(groups, needed, strict=True)
        ]
        return [*rows, *tokens, *kept, *(slots for *_, slots in groups)]


@pytest.mark.parametrize("pages", [(16,), (), (1, 7)])
@pytest.mark.parametrize("n", [1, 2, 63, 140])
def test_a_step_of_decode_rows(n: int, pages: tuple[int, ...], rng: np.random.Generator) -> None:
    world = World(rng, np.ones(n, np.int64))
    close(world.step(OVERRIDES["gather_step"], pages), world.step(REFERENCES["gather_step"], pages), "gather_rows")


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("case", ["chunk", "drafts", "mixed", "gaps"])
def test_other_steps(case: str, spare: int, rng: np.random.Generator) -> None:
    """One long chunk; rows of several slots; decode rows and then chunks; rows without slots, first, last and in between."""
    slots = {
        "chunk": np.array([400]),
        "drafts": np.full(90, 4),
        "mixed": np.array([1] * 70 + [130, 1, 90]),
        "gaps": np.array([0, 0, 3, 0, 200, 0, 1, 0]),
    }[case]
    world = World(rng, slots, spare)
    got, want = (world.step(f["gather_step"], (16,)) for f in (OVERRIDES, REFERENCES))
    close(got, want, "gather_rows")
    assert want[9].any(), "some tokens are valid"


def test_pages_that_are_not_needed_are_left() -> None:
    """The row needs 2 of 9 pages; a dead row gets its first."""
    plan = [int32([1, 0]), int32([1, 0]), int32([0, 0]), int32([0, 1, 2])]
    columns = [int32(values) for values in ([0, 16], [1, 17], [0, 0], [0, 0], [0, 0])]
    table = int32([[90 + i for i in range(9)], list(range(1, 10))])
    out, slots = torch.full((2, 9), -5, dtype=torch.int32, device=DEVICE), nan(2, dtype=torch.int64)
    rows = [nan(2, dtype=dtype) for dtype in (*[torch.int32] * 3, torch.bool, torch.int32, torch.int64)]
    tokens = [nan(2, dtype=dtype) for dtype in (*[torch.int64] * 3, torch.bool)]
    ids = torch.zeros(2, 40, dtype=torch.int32, device=DEVICE)
    OVERRIDES["gather_step"](*plan, *columns, ids, *rows, *tokens, [(table, 16, out, slots)])
    assert out.tolist() == [[1, 2] + [-5] * 7, [90] + [-5] * 8]
    assert slots.tolist() == [2 * 16, -1]


def test_long_block_tables(rng: np.random.Generator) -> None:
    """More pages than a program copies at once, of a table that is wider."""
    table, rows = int32(rng.integers(0, 99, (8, 1400))), int32([3, 7, 0, 7])
    for pages in (1, 1023, 1024, 1025, 1300):
        out = nan(4, pages, dtype=torch.int32)
        OVERRIDES["gather_block_table"](table, rows, out)
        close(out, table[rows.long(), :pages], "gather_block_table")


def test_slots_past_two_to_the_31() -> None:
    out, one = nan(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    OVERRIDES["slot_mapping"](int32([[2**31 - 1]]), one, one + 3, one == 0, 16, out)
    assert out.item() == (2**31 - 1) * 16 + 3
