"""What a step does on the device, and the closures that do it: of a planned step, or of a shape, for a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from modelrunner.attention import AttentionBackend, AttentionMeta, BoundAttention, ByGroup, attention_meta
from modelrunner.batch import EMPTY_PATCH, Batch, Feature, Plan, as_built
from modelrunner.device import Device
from modelrunner.draft_part import COLUMN as DRAFTS
from modelrunner.draft_part import DraftPart, bind
from modelrunner.extras import Extras
from modelrunner.graphs import Key
from modelrunner.media_steps import MediaSteps
from modelrunner.model_state import ModelState, Tap
from modelrunner.ops import Ops
from modelrunner.runner_parts import Parts
from modelrunner.step_buffers import Buckets, Shape, StepBuffers
from modelrunner.step_logprobs import NOTHING, Asked, StepLogprobs
from modelrunner.tap_set import ActiveTaps


class StepWork:
    """The device's side of a `Runner`, which sets all of these.

    groups, draft_groups: names of the target's cache groups and of the drafter's. caches: the target's. layer_index: place of a model's
    layer in its group. slots: 0 to K. ring, counter: of records. scratch_row: of padding.
    """

    parts: Parts
    device: Device
    ops: Ops
    state: ModelState
    buckets: Buckets
    buffers: StepBuffers
    drafting: DraftPart | None
    slots: torch.Tensor
    ring: torch.Tensor
    counter: torch.Tensor
    extras: Extras
    logprobs: StepLogprobs
    media: MediaSteps | None
    scratch_row: int
    max_model_len: int
    warming_up: bool
    groups: list[str]
    draft_groups: tuple[str, ...]
    caches: Mapping[str, torch.Tensor]
    layer_index: Mapping[str, dict[int, int]]

    def _shape(self, key: Key) -> Shape:
        """The shape of every step that runs as `key`. Which rows of a body decode is for the device to see."""
        if key.part in ("body", "draft"):
            return Shape(self.buckets.body_rows, key.size, 0, key.size, self.buckets.body_rows)
        slots = 1 + key.num_draft
        return Shape(key.size, key.size * slots, key.size, slots, key.size)

    def _closure(self, key: Key) -> Callable[[], None]:
        """A step of decode rows, or part of a step with prompts, with the bounds of any such step, for a graph."""
        shape, length = self._shape(key), self.max_model_len
        rows = np.full(shape.num_rows, self.scratch_row, np.int32)
        pages = tuple(layout.pages_for(length) for layout in self.parts.layouts)
        plan = Plan(
            -1, rows, rows, rows, EMPTY_PATCH, shape.num_decode, shape.num_tokens, shape.max_query, length, pages,
            key.features, key.num_draft, key.num_next,
        )  # fmt: skip
        if key.part == "step":
            return self._computation(plan, shape, None, NOTHING, captured=True)
        sampled, columns = self.buffers.sampled[: shape.tail_rows * (1 + key.num_draft)], self.parts.table.columns
        if key.part == "tail":
            return partial(self._captured_tail, self.buffers.tail(plan, shape, columns), sampled)
        batch = self.buffers.batch(plan, shape, columns)
        if key.part == "draft":
            return self._draft_work(batch, key.num_next, captured=True)
        return partial(self._captured_body, batch, self._attention(batch, captured=True), sampled)

    @torch.inference_mode()
    def _captured_body(self, batch: Batch, attention: Mapping[str, BoundAttention], sampled: torch.Tensor) -> None:
        self._inputs(batch)
        torch.index_select(self._body(batch, attention, no_tap), 0, self._lines(batch, batch.num_rows), out=sampled)

    @torch.inference_mode()
    def _captured_tail(self, batch: Batch, sampled: torch.Tensor) -> None:
        self._tail(batch, sampled, NOTHING)

    def _computation(self, plan: Plan, shape: Shape, taps: ActiveTaps | None, asked: Asked, captured: bool = False) -> Callable[[], None]:
        """Everything that a step does after its inputs are uploaded. Views and metadata are made here, on the host."""
        columns = self.parts.table.columns
        if self.device.captures and (features := as_built(plan.features)) != plan.features:
            plan = replace(plan, features=features)
        batch = self.buffers.batch(plan, shape, columns)
        tail = batch if shape.num_decode == shape.num_rows else self.buffers.tail(plan, shape, columns)
        draft = None
        if self.drafting is not None and not (captured and self.drafting_apart):
            draft = self._draft_work(batch, plan.num_next, captured)
        return partial(self._compute, batch, tail, self._attention(batch, captured), taps, asked, draft)

    @property
    def drafting_apart(self) -> bool:
        """Whether the draft part runs after the step's graph, and not in it."""
        return self.parts.drafting is not None and bool(self.parts.drafting.capture_problem)

    def _draft_work(self, batch: Batch, num_next: int, captured: bool) -> Callable[[], None]:
        """The draft part of a step."""
        parts, drafting = self.parts, self.drafting
        assert drafting is not None, "there is no drafter"
        attention = ByGroup((name, bind(parts, name, batch, captured)) for name in self.draft_groups)

        @torch.inference_mode()
        def work() -> None:
            drafting.run(batch, num_next, attention, parts, captured)

        return work

    def _attention(self, batch: Batch, captured: bool) -> Mapping[str, BoundAttention]:
        backends = self.parts.backends
        return ByGroup(
            (name, BoundAttention(backends[name], self.layer_index[name], self._metadata(backends[name], batch, captured)))
            for name in self.groups
        )

    def _metadata(self, backend: AttentionBackend, batch: Batch, captured: bool) -> AttentionMeta:
        return self.state.attention_metadata(backend.group, batch, attention_meta(backend.group, batch, captured))

    def _compute(
        self,
        batch: Batch,
        tail: Batch,
        attention: Mapping[str, BoundAttention],
        taps: ActiveTaps | None,
        asked: Asked,
        draft: Callable[[], None] | None,
    ) -> None:
        with torch.inference_mode():
            self._inputs(batch)
            hidden = self._body(batch, attention, no_tap if taps is None else taps.bind(batch))
            if taps is not None and taps.reports:
                self.extras.write(taps, batch, self.counter)
            if asked.spans:
                self.logprobs.prompts(asked, hidden, batch, self.state.logits, self.counter)
            if tail is not batch:  # otherwise a row's tokens are the ones that it samples from
                hidden = hidden.index_select(0, self._lines(batch, tail.num_rows))
            self._tail(tail, hidden, asked)
            if draft is not None:
                draft()

    def _lines(self, batch: Batch, num_rows: int) -> torch.Tensor:
        """Places of the tokens that rows sample from: the last known one and, behind it, as many more as a row may have drafts."""
        if not batch.num_draft:
            return batch.sample_index[:num_rows]
        places = batch.sample_index[:num_rows].unsqueeze(1) + self.slots[: 1 + batch.num_draft]
        return places.clamp_(max=batch.num_tokens - 1).flatten()

    def _inputs(self, batch: Batch) -> None:
        """Gather what the step reads from the request table."""
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

    def _body(self, batch: Batch, attention: Mapping[str, BoundAttention], tap: Tap) -> torch.Tensor:
        """Embeddings and layers; returns the hidden states, [T, H]."""
        state = self.state
        state.before_forward(batch)
        hidden = self.buffers.hidden[: batch.num_tokens]
        if self.drafting is not None:
            tap = self.drafting.tapping(tap, batch.num_tokens)
        for bound in attention.values():
            bound.begin()
        state.embed(batch, hidden)
        given, more = batch.positions, {}
        if self.media is not None:
            self.media.place(batch, hidden)
            given = self.media.positions(batch)
            more = {} if self.parts.needs.media is None else {"media": batch.media}
        positions = state.positions(batch, given)
        hidden = state.forward(hidden, positions, attention, self.caches, tap, **more)
        if self.warming_up:
            self._require("forward", hidden, batch.num_tokens, self.parts.needs.hidden_size)
        if self.drafting is not None:
            self.drafting.keep(hidden)
        return hidden

    def _tail(self, batch: Batch, hidden: torch.Tensor, asked: Asked) -> None:
        """Head, sampling and verification, log-probs, state update and record."""
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
        """The batch of a step with drafts as the sampler sees it, line by line, and the rows' drafts."""
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
