"""What a step does on the device: patch, gather, embed, layers, hidden states at the sampling positions (the body); head, sampling, state
update, record (the tail); then what a drafter proposes for the next step.

`StepWork` hands out closures. Views and metadata are made with a closure, on the host; what it enqueues is in the methods marked D.,
which run when the device takes the work, for a graph while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from modelrunner.attention import AttentionBackend, AttentionMeta, BoundAttention, ByGroup, attention_meta
from modelrunner.batch import Batch, Feature, Patch, Plan, as_built, record_words
from modelrunner.device import PinnedBuffer
from modelrunner.draft_part import COLUMN as DRAFTS
from modelrunner.draft_part import DraftPart, bind
from modelrunner.extras import Extras
from modelrunner.media_steps import media_steps
from modelrunner.model_state import Tap
from modelrunner.runner_parts import Parts
from modelrunner.start_checks import CheckedAttention, TapNames
from modelrunner.step_buffers import PlanPacker, Shape, StepBuffers
from modelrunner.step_logprobs import NOTHING, Asked, StepLogprobs
from modelrunner.tap_set import ActiveTaps

NARROWED = 2048  # tokens of a step from which on its last layer is left out but for what is sampled


class StepWork:
    """The work of steps, and the device memory that it reads and writes: the inputs, and the rings that results are fetched from."""

    def __init__(self, parts: Parts, packer: PlanPacker, entries: int, rows: int, tokens: int, max_model_len: int) -> None:
        """entries: of the rings. rows, tokens: of a padded step."""
        self.parts = parts
        self.device, self.ops, self.state = parts.device, parts.ops, parts.state
        torch_device, most_drafts = self.device.torch_device, 0 if parts.drafting is None else parts.drafting.most
        self.buffers = StepBuffers(parts.needs, parts.dtype, parts.layouts, rows, tokens, max_model_len, packer, torch_device, most_drafts)
        self.drafting = None if parts.drafting is None else DraftPart(parts, parts.drafting, rows, tokens, max_model_len)
        self.slots = torch.arange(1 + most_drafts, device=torch_device)
        self.ring = torch.zeros(entries, rows, record_words(most_drafts), dtype=torch.int32, device=torch_device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=torch_device)  # of launched steps: which entry of the rings is written
        self.extras = Extras(self.device, entries, rows, parts.taps.record_bytes)
        num_top = parts.sampler.num_logprobs
        self.logprobs = StepLogprobs(self.device, self.ops, parts.table.columns, entries, rows, tokens, num_top, most_drafts)
        self.media = self.buffers.media = media_steps(parts, entries, tokens)
        self.draft_groups = () if parts.drafting is None else parts.drafting.groups
        self.groups = [layout.name for layout in parts.layouts if layout.name not in self.draft_groups]
        self.layer_index = {g.group.name: {layer: i for i, layer in enumerate(g.group.layers)} for g in parts.layouts}
        self.caches = self._own_caches()
        self.warming_up = False  # without graphs, and with checks of what the model state calls and returns
        self.tap_names = TapNames(type(parts.state).__name__, parts.needs.tap_points)

    def _own_caches(self) -> Mapping[str, torch.Tensor]:
        return ByGroup((name, self.parts.caches[name]) for name in self.groups)

    def use_caches(self, caches: Mapping[str, torch.Tensor], backends: Mapping[str, AttentionBackend]) -> None:
        """Take other cache memory, by group."""
        self.parts = replace(self.parts, caches=caches, backends=backends)
        self.caches = self._own_caches()

    # ---- closures, made on the host --------------------------------------------------------------------------------

    def computation(self, plan: Plan, shape: Shape, taps: ActiveTaps | None, asked: Asked, captured: bool = False) -> Callable[[], None]:
        """All that a step does after its inputs are uploaded."""
        columns = self.parts.table.columns
        if self.device.captures and (features := as_built(plan.features)) != plan.features:
            plan = replace(plan, features=features)
        batch = self.buffers.batch(plan, shape, columns)
        tail = batch if shape.num_decode == shape.num_rows else self.buffers.tail(plan, shape, columns)
        draft = None
        if self.drafting is not None and not (captured and self.drafting_apart):
            draft = self._draft_of(batch, plan.num_next, captured)
        return partial(self._compute, batch, tail, self._attention(batch, captured), taps, asked, draft)

    def body_work(self, plan: Plan, shape: Shape) -> Callable[[], None]:
        """The body of a step with prompts, for a graph. It leaves the hidden states to sample from in the buffers."""
        batch = self.buffers.batch(plan, shape, self.parts.table.columns)
        return partial(self._compute_body, batch, self._attention(batch, captured=True), self._sampled(plan, shape))

    def tail_work(self, plan: Plan, shape: Shape) -> Callable[[], None]:
        """The tail of such a step, for a graph."""
        return partial(self._compute_tail, self.buffers.tail(plan, shape, self.parts.table.columns), self._sampled(plan, shape))

    def draft_work(self, plan: Plan, shape: Shape, captured: bool) -> Callable[[], None]:
        """The draft part of a step, by itself."""
        return self._draft_of(self.buffers.batch(plan, shape, self.parts.table.columns), plan.num_next, captured)

    def _sampled(self, plan: Plan, shape: Shape) -> torch.Tensor:
        return self.buffers.sampled[: shape.tail_rows * (1 + plan.num_draft)]

    @property
    def drafting_apart(self) -> bool:
        """Whether the draft part runs after the step's graph, and not in it."""
        return self.parts.drafting is not None and bool(self.parts.drafting.capture_problem)

    def _draft_of(self, batch: Batch, num_next: int, captured: bool) -> Callable[[], None]:
        parts, drafting, checked = self.parts, self.drafting, self.warming_up
        assert drafting is not None, "there is no drafter"
        attention = ByGroup((name, bind(parts, name, batch, captured, checked)) for name in self.draft_groups)

        @torch.inference_mode()
        def work() -> None:
            drafting.run(batch, num_next, attention, parts, captured, checked)

        return work

    def _attention(self, batch: Batch, captured: bool) -> Mapping[str, BoundAttention]:
        return ByGroup((name, self._bound(self.parts.backends[name], batch, captured)) for name in self.groups)

    def _bound(self, backend: AttentionBackend, batch: Batch, captured: bool) -> BoundAttention:
        places, meta = self.layer_index[backend.group.name], self._metadata(backend, batch, captured)
        if self.warming_up:
            return CheckedAttention(backend, places, meta, f"{type(self.state).__name__}.forward", self.parts.dtype)
        return BoundAttention(backend, places, meta)

    def _metadata(self, backend: AttentionBackend, batch: Batch, captured: bool) -> AttentionMeta:
        return self.state.attention_metadata(backend.group, batch, attention_meta(backend.group, batch, captured))

    # ---- on the device ---------------------------------------------------------------------------------------------

    def upload(self, patch: Patch, packed: PinnedBuffer, start: int, end: int) -> None:
        """D. Copy the words start..end-1 of a packed plan to the device, and apply its patch."""
        with torch.inference_mode():
            self.buffers.staging[start:end].copy_(packed.tensor[4 * start : 4 * end].view(torch.int32), non_blocking=True)
            if not patch.empty:
                self.ops.apply_patch(self.parts.table.arena, *self.buffers.patch(patch.dst.size, patch.words.size))

    def _compute(
        self,
        batch: Batch,
        tail: Batch,
        attention: Mapping[str, BoundAttention],
        taps: ActiveTaps | None,
        asked: Asked,
        draft: Callable[[], None] | None,
    ) -> None:
        """D. A whole step."""
        with torch.inference_mode():
            self._inputs(batch)
            lines = self._lines(batch, tail.num_rows) if taps is None and not asked.spans and self._narrows(batch, tail) else None
            hidden = self._body(batch, attention, no_tap if taps is None else taps.bind(batch), lines)
            if taps is not None and taps.reports:
                self.extras.write(taps, batch, self.counter)
            if asked.spans:
                self.logprobs.prompts(asked, hidden, batch, self.state.logits, self.counter)
            if tail is not batch and lines is None:  # otherwise a row's tokens are the ones that it samples from
                hidden = hidden.index_select(0, self._lines(batch, tail.num_rows))
            self._tail(tail, hidden, asked)
            if draft is not None:
                draft()

    @torch.inference_mode()
    def _compute_body(self, batch: Batch, attention: Mapping[str, BoundAttention], sampled: torch.Tensor) -> None:
        """D. The body alone. sampled: the hidden states to sample from, written."""
        self._inputs(batch)
        torch.index_select(self._body(batch, attention, no_tap), 0, self._lines(batch, batch.num_rows), out=sampled)

    @torch.inference_mode()
    def _compute_tail(self, batch: Batch, sampled: torch.Tensor) -> None:
        """D. The tail alone."""
        self._tail(batch, sampled, NOTHING)

    def _lines(self, batch: Batch, num_rows: int) -> torch.Tensor:
        """D. Places of the tokens that rows sample from: the last known one and, behind it, as many more as a row may have drafts."""
        if not batch.num_draft:
            return batch.sample_index[:num_rows]
        places = batch.sample_index[:num_rows].unsqueeze(1) + self.slots[: 1 + batch.num_draft]
        return places.clamp_(max=batch.num_tokens - 1).flatten()

    def _inputs(self, batch: Batch) -> None:
        """D. Gather what the step reads from the request table."""
        ops, buffers, columns = self.ops, self.buffers, self.parts.table.columns
        rows, generations, num_query, query_start = buffers.row_inputs(batch.num_rows)
        groups = [
            (columns[f"pages.{name}"], layout.tokens_per_page, batch.block_tables[name], batch.slots[name])
            for layout in self.parts.layouts
            for name in (layout.group.name,)
        ]
        ops.gather_step(
            rows,
            num_query,
            generations,
            query_start,
            columns["computed"],
            columns["known"],
            columns["finished"],
            columns["generation"],
            columns["num_accepted"],
            columns["token_ids"],
            batch.query_len,
            batch.computed,
            batch.seq_len,
            batch.samples,
            batch.num_accepted,
            batch.sample_index,
            batch.input_ids,
            batch.positions,
            batch.token_row,
            batch.token_valid,
            groups,
            columns.get(DRAFTS),
        )

    def _narrows(self, batch: Batch, tail: Batch) -> bool:
        """Whether the last layer is to give the sampled tokens alone: not in a body of a captured shape, whose graph gives all, nor at the
        warm-up, as other steps need the memory."""
        state, wide = self.state, batch.num_tokens >= max(NARROWED, 4 * tail.num_rows) and batch.num_rows == tail.num_rows
        return wide and state.narrows and self.drafting is None and not self.warming_up and not state.settings.device.deterministic

    def _body(self, batch: Batch, attention: Mapping[str, BoundAttention], tap: Tap, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """D. Embeddings and layers; returns the hidden states, [T, H], or those of `sampled`."""
        state = self.state
        state.before_forward(batch)
        hidden = self.buffers.hidden[: batch.num_tokens]
        if self.drafting is not None:
            tap = self.drafting.tapping(tap, batch.num_tokens)
        if self.warming_up:
            tap = self.tap_names.noting(tap)
        for bound in attention.values():
            bound.begin()
        written: object = state.embed(batch, hidden)
        if self.warming_up and written is not None and written is not hidden:
            raise TypeError(f"{type(state).__name__}.embed returned a {type(written).__name__}; it is to write into `out` and return None")
        given: torch.Tensor = batch.positions
        more: dict[str, Any] = {}
        if self.media is not None:
            self.media.place(batch, hidden)
            given = self.media.positions(batch)
            more = {} if self.parts.needs.media is None else {"media": batch.media}
        if sampled is not None:
            more["sampled"] = sampled
        positions = state.positions(batch, given)
        hidden = state.forward(hidden, positions, attention, self.caches, tap, **more)
        if self.warming_up:
            self._require("forward", hidden, batch.num_tokens, self.parts.needs.hidden_size)
        if self.drafting is not None:
            self.drafting.keep(hidden)
        return hidden

    def _tail(self, batch: Batch, hidden: torch.Tensor, asked: Asked) -> None:
        """D. Head, sampling and verification, log-probs, state update and record."""
        columns = self.parts.table.columns
        rows, generations, _, _ = self.buffers.row_inputs(batch.num_rows)
        logits = self.state.logits(hidden)
        lines, num_drafted = self._spread(batch) if batch.num_draft else (batch, None)
        if self.warming_up:
            self._require("logits", logits, lines.num_rows, self.parts.needs.vocab_size)
        wanted = batch.features & Feature.LOGPROBS
        note = partial(self.logprobs.note, asked, 1 + batch.num_draft) if wanted else None
        draft_probs = self.drafting.drawn_from(batch) if self.drafting is not None and batch.num_draft else None
        tokens, num_tokens, ok = self.parts.sampler.sample(logits, lines, note, draft_probs)
        if wanted:
            self.logprobs.send(tokens.numel(), self.counter)
        ends = self.parts.sampler.ends(batch, tokens, num_tokens, ok)
        self.ops.finish_step(
            self.ring,
            self.counter,
            generations,
            rows,
            batch.query_len,
            batch.samples,
            tokens,
            num_tokens,
            ok,
            columns["token_ids"],
            columns["computed"],
            columns["known"],
            columns["finished"],
            columns["limit"],
            columns["num_accepted"],
            columns["stop_ids"],
            columns["stop_ids.seats"],
            ends,
            num_drafted=num_drafted,
        )

    def _spread(self, batch: Batch) -> tuple[Batch, torch.Tensor]:
        """D. The batch of a step with drafts as the sampler sees it, line by line, and the rows' drafts."""
        slots, buffers = 1 + batch.num_draft, self.buffers
        given = (batch.rows, batch.query_len, batch.samples, batch.computed, self.parts.table.columns["known"])
        lines, num_drafted = [each[: batch.num_rows * slots] for each in buffers.lines], buffers.num_drafted[: batch.num_rows]
        self.ops.spread_rows(*given, slots, *lines, num_drafted)
        rows, samples, computed, query_len, ahead = lines
        spread = replace(batch, rows=rows, samples=samples, computed=computed, query_len=query_len, ahead=ahead)
        return replace(spread, num_rows=batch.num_rows * slots), num_drafted

    def _require(self, method: str, value: object, *shape: int) -> None:
        """Check what the model state returned; for the warm-up, whose shapes stand for all others."""
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r} ({type(value).__name__})"
            raise TypeError(f"{type(self.state).__name__}.{method} returned {got}; a tensor of shape {list(shape)} is needed")


def no_tap(name: str, hidden: torch.Tensor) -> torch.Tensor:
    """The tap of a step that nobody reads or steers."""
    return hidden
