"""What a step may touch: cache pages of its own rows, its slots in them, the state's own columns and buffers; and nothing may be read
before it was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.model_state import FullAttention, RecurrentState

if TYPE_CHECKING:
    from modelrunner.batch import Batch, Plan, Ticket
    from modelrunner.engine import Engine

BAD_INTEGER = -(2**30)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with an integer that no index may be."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(max(BAD_INTEGER, torch.iinfo(tensor.dtype).min))


def same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Elementwise equality in which NaN equals NaN."""
    return (one == other) | (one.isnan() & other.isnan()) if one.is_floating_point() else one == other


class TouchCheck:
    """Poisons what nobody has written yet, and compares memory before and after every launched step. For devices that run work at once.

    Poisoned: all cache pages but the null page, and the state's static buffers, once; the buffer of hidden states before each step.
    Raises AssertionError from the step that touched what is not its own. steps: checked ones. padded: those with padding rows or tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runner, self.state = engine.runner, engine.assembly.state
        self.groups = {layout.group.name: layout.group for layout in engine.assembly.layouts}
        self.own = {column.name for column in engine.assembly.needs.columns}
        self.steps = self.padded = 0
        self._batch: Batch | None = None
        self._columns: dict[str, torch.Tensor] = {}
        for cache in self.caches.values():
            poison(cache[1:])
        for buffer in self.runner.buffers.extra.values():
            poison(buffer)
        self._launch, self._before, self._forward = self.runner.launch, self.state.before_forward, self.state.forward
        setattr(self.runner, "launch", self._check_launch)  # noqa: B010  (methods of instances, which mypy forbids to assign)
        setattr(self.state, "before_forward", self._enter)  # noqa: B010
        setattr(self.state, "forward", self._leave)  # noqa: B010

    @property
    def caches(self) -> Mapping[str, torch.Tensor]:
        return self.runner.parts.caches

    def _enter(self, batch: Batch) -> None:
        self._batch = batch
        self._columns = {name: column.clone() for name, column in batch.columns.items()}
        self._before(batch)

    def _leave(self, *arguments: Any, **media: Any) -> torch.Tensor:
        out = self._forward(*arguments, **media)
        batch = self._batch
        assert batch is not None, "forward was called before before_forward"
        assert out[batch.token_valid].isfinite().all(), "forward gives NaN: something is read that nobody has written"
        live = set(batch.rows[batch.query_len > 0].tolist())
        others = [row for row in range(self.runner.parts.table.max_rows) if row not in live]
        for name, before in self._columns.items():
            after = batch.columns[name]
            if name in self.own:
                assert same(before[others], after[others]).all(), f"column {name!r} changed in rows that have no token in the step"
            elif name.removesuffix(".seats") not in self.own:
                assert same(before, after).all(), f"column {name!r}, which the state does not own, changed"
        return out

    def _check_launch(self, plan: Plan) -> Ticket:
        poison(self.runner.buffers.hidden)
        before = {name: cache.clone() for name, cache in self.caches.items()}
        ticket = self._launch(plan)
        batch = self._batch
        assert batch is not None, "the step did not call before_forward"
        self._check_pages(before, batch)
        for name, group in self.groups.items():
            if isinstance(group, FullAttention):
                self._check_tokens(name, before[name], batch)
            elif isinstance(group, RecurrentState):
                self._check_states(group, before[name], batch)
        self.steps += 1
        self.padded += not bool(batch.token_valid.all())
        return ticket

    def _check_pages(self, before: Mapping[str, torch.Tensor], batch: Batch) -> None:
        """Only pages of the step's live rows changed, and never the null page."""
        live = batch.query_len > 0
        allowed = {page for table in batch.block_tables.values() for page in table[live].flatten().tolist()} - {0}
        for name, cache in self.caches.items():
            kept = same(before[name], cache).flatten(1).all(1)
            strange = sorted(set((~kept).nonzero().flatten().tolist()) - allowed)
            assert not strange, (
                f"cache pages {strange} changed, seen through group {name!r}; the block tables of the step's rows hold {sorted(allowed)}"
            )

    def _readable(self, name: str, batch: Batch) -> torch.Tensor:
        """Pages that the step may read or write. Entries before and after these in a row's block table may name pages of other owners:
        pages that left the window, and those of the row's former request."""
        lengths, table, size = batch.seq_len.long(), batch.block_tables[name], self.caches[name].shape[2]
        first = torch.from_numpy(self.groups[name].needed_from((lengths - batch.query_len).numpy(force=True))).to(table.device)
        place = torch.arange(table.shape[1], device=table.device)
        return table[(place >= first.unsqueeze(1) // size) & (place * size < lengths.unsqueeze(1))]

    def _check_tokens(self, name: str, before: torch.Tensor, batch: Batch) -> None:
        """In this group's pages only the step's slots changed, and there every declared layer was written."""
        cache, size = self.caches[name], self.caches[name].shape[2]
        slots = batch.slots[name]
        slots = slots[slots >= 0]
        own = torch.zeros(cache.shape[0], size, dtype=torch.bool, device=cache.device)
        own[slots // size, slots % size] = True
        pages = self._readable(name, batch).unique().long()
        kept = same(before, cache).flatten(3).all(3).all(1)  # [pages, tokens]
        strange = (~kept & ~own)[pages].nonzero().tolist()
        assert not strange, f"group {name!r}: [page of the step, token] {strange[:8]} changed, which are not at the step's slots"
        written = cache[slots // size, :, slots % size].isfinite().flatten(2).all(2).all(0)  # [layers]
        missing = [layer for layer, whole in zip(self.groups[name].layers, written.tolist(), strict=True) if not whole]
        assert not missing, f"group {name!r} declares layers {missing}, whose keys and values no step has written at its slots"

    def _check_states(self, group: RecurrentState, before: torch.Tensor, batch: Batch) -> None:
        """Of this group's pages that the step may use, only those of its own tokens changed, and there every declared layer was written."""
        cache, table, size = self.caches[group.name], batch.block_tables[group.name], group.interval
        end = batch.seq_len.unsqueeze(1)
        start = end - batch.query_len.unsqueeze(1)
        place = torch.arange(table.shape[1], device=table.device)
        held = place * size < end
        own = table[held & (place >= start // size)].unique().long()
        read = table[held & (place >= (start - 1).clamp(min=0) // size)].unique().long()
        changed = ~same(before, cache).flatten(2).all(2)  # [pages, layers]
        strange = sorted({page for page in read.tolist() if changed[page].any()} - set(own.tolist()))
        assert not strange, f"group {group.name!r}: pages {strange} changed, snapshots that a step reads and others may have found"
        missing = [layer for layer, written in zip(group.layers, changed[own].any(0).tolist(), strict=True) if not written]
        assert not missing or not own.numel(), f"group {group.name!r} declares layers {missing}, whose states no step has written"
