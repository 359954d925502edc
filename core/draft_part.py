"""The drafter's part of a step: after the tail it proposes what the next step checks.

Everything that a drafter is told lies in buffers of fixed addresses, so that body, tail and draft part can be graphs of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from modelrunner.attention import BoundAttention, ByGroup, attention_meta
from modelrunner.batch import Batch
from modelrunner.errors import ModelRunnerError, PluginError
from modelrunner.model_state import Tap
from modelrunner.runner_parts import Drafting, Parts
from modelrunner.speculation import DraftPass, DraftStep
from modelrunner.start_checks import CheckedAttention

COLUMN = "num_drafts"


@dataclass
class PassBuffers:
    """Inputs of a pass over one token a row: [rows] each. tables: pages of each cache group, [rows * pages]."""

    query_start: torch.Tensor
    token_row: torch.Tensor
    query_len: torch.Tensor
    computed: torch.Tensor
    seq_len: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor
    input_ids: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]


class DraftPart:
    """Runs the drafter of an engine. `tapping` and `keep` put aside what it wants to know of the body, `run` follows the tail."""

    def __init__(self, parts: Parts, drafting: Drafting, rows: int, tokens: int, max_model_len: int) -> None:
        """rows, tokens: of a padded step."""
        device = parts.device.torch_device
        needs, self.drafter, self.most, self.label = drafting.needs, drafting.drafter, drafting.most, drafting.label
        self.ops, self.columns, self.vocab_size = parts.ops, parts.table.columns, parts.needs.vocab_size
        self.needs = needs
        self.max_model_len = max_model_len
        self.holds = max_model_len if needs.max_model_len is None else min(needs.max_model_len, max_model_len)
        self.groups = drafting.groups
        self.layouts = [layout for layout in parts.layouts if any(group.name in self.groups for group in layout.groups)]

        def made(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def states() -> torch.Tensor:
            return torch.zeros(tokens, parts.needs.hidden_size, dtype=parts.dtype, device=device)

        self.wants, self.known = made(rows, torch.bool), made(rows, torch.int32)
        self.newest, self.last_place = made(rows, torch.int64), made(rows, torch.int64)
        self.next_ids, self.positions = made(tokens, torch.int64), made(tokens, torch.int64)
        self.out = made(rows * self.most, torch.int32)
        shapes = (parts.table.num_rows, rows) if needs.probabilities else ()  # of each row of the table, and of the step
        self.probabilities = [torch.zeros(size, self.most, self.vocab_size, device=device) for size in shapes]
        self.hidden = states() if needs.hidden else None
        self.taps = {point: states() for point in needs.tap_points}
        self.passes = PassBuffers(
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            token_row=torch.arange(rows, device=device),
            query_len=made(rows, torch.int32),
            computed=made(rows, torch.int32),
            seq_len=made(rows, torch.int32),
            positions=made(rows, torch.int64),
            valid=made(rows, torch.bool),
            input_ids=made(rows, torch.int64),
            slots={layout.name: made(rows, torch.int64) for layout in self.layouts},
            tables={layout.name: made(rows * layout.pages_for(max_model_len), torch.int32) for layout in self.layouts},
        )

    # ---- in the body -----------------------------------------------------------------------------------------------

    def tapping(self, inner: Tap, num_tokens: int) -> Tap:
        """D. The tap of a step that also keeps the target's hidden states where the drafter wants them."""
        if not self.taps:
            return inner

        def tap(point: str, hidden: torch.Tensor) -> torch.Tensor:
            if point in self.taps:
                self.taps[point][:num_tokens].copy_(hidden)
            return inner(point, hidden)

        return tap

    def keep(self, hidden: torch.Tensor) -> None:
        """D. Put the step's last hidden states aside, [T, H]."""
        if self.hidden is not None:
            self.hidden[: hidden.shape[0]].copy_(hidden)

    # ---- after the tail --------------------------------------------------------------------------------------------

    def run(
        self, batch: Batch, num_next: int, attention: Mapping[str, BoundAttention], parts: Parts, captured: bool, checked: bool
    ) -> None:
        """D. Propose num_next tokens for each row of the step, and store them. attention: the drafter's groups over the step's tokens.
        checked: at the warm-up.

        Raises PluginError that names the drafter for what it raises."""
        n, columns = batch.num_rows, self.columns
        out = self.out[: n * num_next].view(n, num_next)
        if num_next or self.needs.cache_groups:
            step = self._step(batch, num_next, attention, parts, captured, checked)
            for bound in attention.values():
                bound.begin()
            self._propose(step, out.fill_(-1), self._unwritten_probabilities(n, num_next))
            self._store_probabilities(batch, num_next)
        self.ops.store_drafts(
            batch.rows,
            batch.query_len,
            self.wants[:n],
            out,
            self.vocab_size,
            columns["known"],
            columns["limit"],
            columns["token_ids"],
            columns[COLUMN],
        )

    def _propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        try:
            self.drafter.propose(step, out, probabilities)
        except (ModelRunnerError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise PluginError(f"{self.label} failed in `propose`: {type(error).__name__}: {error}") from error

    def _unwritten_probabilities(self, num_rows: int, num_next: int) -> torch.Tensor | None:
        return self.probabilities[1][:num_rows, :num_next].zero_() if self.probabilities else None

    def _store_probabilities(self, batch: Batch, num_next: int) -> None:
        if self.probabilities and num_next:
            kept, given = self.probabilities
            kept[:, :num_next].index_copy_(0, batch.rows.long(), given[: batch.num_rows, :num_next])

    def drawn_from(self, batch: Batch) -> torch.Tensor | None:
        """D. What the drafts of a step were drawn from, [N, k, V] float32; None for a drafter that gives no probabilities."""
        return self.probabilities[0][:, : batch.num_draft].index_select(0, batch.rows) if self.probabilities else None

    def _step(
        self, batch: Batch, num_next: int, attention: Mapping[str, BoundAttention], parts: Parts, captured: bool, checked: bool
    ) -> DraftStep:
        n, t, columns = batch.num_rows, batch.num_tokens, self.columns
        out = (self.wants[:n], self.known[:n], self.newest[:n], self.last_place[:n], self.next_ids[:t], self.positions[:t])
        self.ops.draft_inputs(
            batch.rows,
            batch.query_start,
            batch.query_len,
            batch.samples,
            batch.computed,
            batch.token_row,
            batch.positions,
            batch.token_valid,
            columns["known"],
            columns["finished"],
            columns["token_ids"],
            num_next,
            self.holds,
            *out,
        )
        return DraftStep(
            batch,
            num_next,
            *out,
            hidden=None if self.hidden is None else self.hidden[:t],
            taps={point: states[:t] for point, states in self.taps.items()},
            attention=attention,
            caches=ByGroup((name, parts.caches[name]) for name in self.groups),
            columns=columns,
            next_pass=partial(self._pass, batch, parts, captured, checked),
        )

    def _pass(self, batch: Batch, parts: Parts, captured: bool, checked: bool, index: int) -> DraftPass:
        n, own, columns = batch.num_rows, self.passes, self.columns
        longest = min(batch.max_seq_len + 1 + self.most, self.max_model_len)
        tables = {}
        for layout in self.layouts:
            pages = layout.pages_for(longest)
            tables[layout.name] = own.tables[layout.name][: n * pages].view(n, pages)
            if index == 0:
                self.ops.gather_block_table(columns[f"pages.{layout.name}"], batch.rows, tables[layout.name])
        slots = {name: places[:n] for name, places in own.slots.items()}
        groups = [(tables[layout.name], layout.tokens_per_page, slots[layout.name]) for layout in self.layouts]
        lengths = (own.query_len[:n], own.computed[:n], own.seq_len[:n])
        places = (own.positions[:n], own.valid[:n])
        owner = {group.name: layout.name for layout in self.layouts for group in layout.groups}
        self.ops.draft_pass(batch.rows, self.wants[:n], self.known[:n], columns["limit"], index, groups, *lengths, *places)
        single = replace(
            batch,
            num_tokens=n,
            num_decode=n,
            max_query=1,
            max_seq_len=longest,
            num_draft=0,
            query_start=own.query_start[: n + 1],
            query_len=lengths[0],
            computed=lengths[1],
            seq_len=lengths[2],
            sample_index=own.token_row[:n],
            input_ids=own.input_ids[:n],
            positions=places[0],
            token_row=own.token_row[:n],
            token_valid=places[1],
            slots={name: slots[owner[name]] for name in self.groups},
            block_tables={name: tables[owner[name]] for name in self.groups},
            prompts=None,
            media=None,
        )
        attention = ByGroup((name, bind(parts, name, single, captured, checked)) for name in self.groups)
        for bound in attention.values():
            bound.begin()
        return DraftPass(single, attention)


def bind(parts: Parts, group: str, batch: Batch, captured: bool, checked: bool) -> BoundAttention:
    """Attention of one group of the drafter over a batch. checked: with a look at what it is called with."""
    backend = parts.backends[group]
    layers = {layer: place for place, layer in enumerate(backend.group.layers)}
    meta = attention_meta(backend.group, batch, captured)
    if checked and parts.drafting is not None:
        return CheckedAttention(backend, layers, meta, parts.drafting.label, parts.dtype)
    return BoundAttention(backend, layers, meta)
