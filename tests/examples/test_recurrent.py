"""The recurrent example: its operation against the plain recurrence, and the package, installed by pip, through the suite."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid import SOURCE
from package_site import installed, passed
from torch import Tensor

HEADS, SIZE, INTERVAL, REPLAY, TABLE = 2, 3, 4, 3, 6


def scan_module() -> Any:
    from modelrunner_recurrent import scan

    return scan


# ---- the operation ---------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows with pages of their own in a memory full of NaN, and inputs for every token they may get."""

    lengths: list[int]  # tokens in the cache
    inputs: Tensor  # [rows, TABLE * INTERVAL, 4, HEADS, SIZE]: q, k, v, decay
    cache: Tensor
    table: Tensor

    @classmethod
    def make(cls, count: int, seed: int = 0) -> Rows:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, TABLE * INTERVAL, 4, HEADS, SIZE, generator=generator)
        inputs[:, :, 3] = inputs[:, :, 3].sigmoid()
        cache = torch.full((1 + count * TABLE, scan_module().page_elements(HEADS, SIZE, REPLAY)), torch.nan)
        cache[0] = 0.0
        table = 1 + torch.randperm(count * TABLE, generator=generator).view(count, TABLE).int()
        return cls([0] * count, inputs, cache, table)

    def step(self, counts: list[int], *, padding: int = 0, strided: bool = False) -> list[Tensor]:
        """Give row i `counts[i]` more query tokens, 0 for a dead row; results per row. `padding` tokens of nobody follow."""
        query_len = torch.tensor(counts, dtype=torch.int32)
        slots = [max(count, 1) for count in counts]  # a dead row keeps its place in the batch
        start = torch.tensor([0, *slots]).cumsum(0).int()
        given = torch.full((int(start[-1]) + padding, 4, HEADS, SIZE), torch.nan)
        for row, count in enumerate(counts):
            given[start[row] : start[row] + count] = self.inputs[row, self.lengths[row] : self.lengths[row] + count]
        seq_len = torch.where(query_len > 0, torch.tensor(self.lengths) + query_len, 0).int()
        table = torch.stack([self.table] * 2, -1)[..., 1] if strided else self.table
        places = (table, start, query_len, seq_len)
        sizes = {"interval": INTERVAL, "replay": REPLAY, "max_query": max(slots) + padding}
        out = scan_module().gated_scan(*given.unbind(1), self.cache, *places, **sizes)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return [out[start[row] : start[row] + count] for row, count in enumerate(counts)]

    def keep(self, row: int, kept: int, of: int) -> None:
        """Of the row's last step only the first `kept` of `of` tokens count; others may come in their place."""
        self.lengths[row] -= of - kept

    def want(self, row: int) -> Tensor:
        """The plain recurrence over the row's tokens so far: [tokens, HEADS, SIZE]."""
        state, out = torch.zeros(HEADS, SIZE, SIZE), []
        for q, k, v, decay in self.inputs[row, : self.lengths[row]]:
            state = decay[:, :, None] * state + k[:, :, None] * v[:, None, :]
            out.append((q[:, None, :] @ state).squeeze(1))
        return torch.stack(out)


def check(rows: Rows, row: int, got: Tensor) -> None:
    torch.testing.assert_close(got, rows.want(row)[rows.lengths[row] - len(got) : rows.lengths[row]])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "chunks", [[(1, 1, 1)] * 20, [(20, 3, 9)], [(4, 8, 1), (4, 1, 7), (3, 1, 1), (9, 2, 1)], [(5, 0, 2), (0, 6, 2), (1, 1, 0)]]
)
def test_any_cut_into_steps_gives_the_recurrence(chunks: list[tuple[int, ...]], strided: bool) -> None:
    rows = Rows.make(3)
    for counts in chunks:
        for row, got in enumerate(rows.step(list(counts), strided=strided)):
            if len(got):
                check(rows, row, got)


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_tokens_that_do_not_count_leave_no_trace(at: int, kept: int) -> None:
    """A row whose last step kept fewer tokens than it computed: others come in their place, again and again, across pages."""
    rows = Rows.make(2)
    rows.step([at, 1])
    for turn in range(3):
        for row, got in enumerate(rows.step([3, 1])):
            check(rows, row, got)
        rows.keep(0, kept, of=3)
        rows.inputs[0, rows.lengths[0] :] = Rows.make(1, seed=10 + turn).inputs[0, rows.lengths[0] :]
    for row, got in enumerate(rows.step([5, 2])):
        check(rows, row, got)


def test_a_full_page_is_a_snapshot_for_others() -> None:
    """A row that finds another's page goes on from its end; the page stays as it is."""
    rows = Rows.make(2)
    rows.step([10, 0])
    rows.inputs[1, :8] = rows.inputs[0, :8]
    rows.table[1, 1], rows.lengths[1] = rows.table[0, 1], 8
    before = rows.cache[rows.table[0, 1]].clone()
    for row, got in enumerate(rows.step([3, 3])):
        check(rows, row, got)
    torch.testing.assert_close(rows.cache[rows.table[0, 1]], before, rtol=0, atol=0, equal_nan=True)


def test_dead_rows_and_padding_write_nothing() -> None:
    rows = Rows.make(3)
    rows.step([5, 5, 5])
    before = rows.cache.clone()
    first, dead, last = rows.step([2, 0, 1], padding=3)
    check(rows, 0, first)
    check(rows, 2, last)
    assert len(dead) == 0
    changed = {page for page in range(len(before)) if not torch.equal(before[page].nan_to_num(7), rows.cache[page].nan_to_num(7))}
    assert changed == {int(rows.table[0, 1]), int(rows.table[2, 1])}
    assert not rows.cache[0].any()


# ---- broken states ---------------------------------------------------------------------------------------------------


def broken(kind: str) -> Any:
    """The example with a flaw, in modelrunner's suite. snapshot: changes the page that it goes on from. layers: has one too many."""
    from modelrunner_recurrent.state import RecurrentExample
    from tiny_recurrent import Recurrence, write_checkpoint

    from modelrunner.testing.conformance import ModelStateConformance

    class Broken(RecurrentExample):
        def __init__(self, card: Any, settings: Any) -> None:
            super().__init__(card, settings)
            if kind == "layers":
                self.recurrent = dataclasses.replace(self.recurrent, layers=(*self.recurrent.layers, 4))

        def forward(self, hidden: Tensor, positions: Tensor, attention: Any, caches: Any, tap: Any) -> Tensor:
            out = super().forward(hidden, positions, attention, caches, tap)
            if kind == "snapshot":
                meta, size = attention["recurrent"].meta, self.recurrent.interval
                first = (meta.seq_len - meta.query_len).long()
                page = meta.block_table[torch.arange(len(first)), (first - 1).clamp(min=0) // size] * (first > 0)
                caches["recurrent"][page.long()] *= 1.5
            return out

    class Suite(ModelStateConformance):
        model_state = Broken
        plugins = ("modelrunner_recurrent",)

        def checkpoint(self, folder: Path, seed: int) -> None:
            write_checkpoint(folder, seed)

        def reference(self, folder: Path) -> Any:
            return Recurrence(folder)

    return Suite()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("snapshot", "snapshots that a step reads"), ("layers", r"declares layers \[4\], whose states no step has written")],
)
def test_the_suite_finds_a_broken_state(kind: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        broken(kind).test_touches_what_it_declares()


# ---- the package -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(SOURCE, tmp_path_factory.mktemp("recurrent"))


def test_it_is_small() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in (SOURCE / "modelrunner_recurrent").glob("*.py")}
    assert len(lines) == 3
    assert sum(lines.values()) < 250, lines


def test_passes_the_suite(site: Path) -> None:
    assert " passed" in passed(SOURCE / "test_recurrent.py", site)
