"""The runner: launch a planned step, collect its results. It holds what every model shares and nothing else.

`launch` packs what is new in the plan into a pinned buffer, hands the device one closure and one copy on the side stream, and returns. The
closure is the step: patch, gather, embed, layers, hidden states at the sampling positions (the body); head, sampling, state update, record
(the tail).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from modelrunner import blank_plans
from modelrunner.attention import AttentionBackend, AttentionMeta, BoundAttention, ByGroup, attention_meta
from modelrunner.batch import EDITED, EMPTY_PATCH, LOGGED, Batch, Feature, Outcome, Patch, Plan, Record, Ticket, as_built, record_words
from modelrunner.device import Event, PinnedBuffer
from modelrunner.draft_part import COLUMN as DRAFTS
from modelrunner.draft_part import DraftPart, bind
from modelrunner.errors import EngineError, PluginError
from modelrunner.extras import Extras
from modelrunner.graphs import CAPTURED, DraftKinds, GraphReport, Key, StepGraphs
from modelrunner.media_steps import media_steps
from modelrunner.model_state import Tap
from modelrunner.runner_parts import Parts, Route
from modelrunner.step_buffers import Buckets, PlanPacker, Shape, StepBuffers
from modelrunner.step_logprobs import NOTHING, Asked, StepLogprobs
from modelrunner.tap_set import ActiveTaps

FIRST_PROMPT = 32  # tokens of a prompt whose kernels are built with the first ones
POISON = -0x5A5A5A5B  # what a released ring entry holds on a testing device: no row, no token


class Runner:
    """Runs planned steps on a device, several in flight."""

    def __init__(
        self,
        parts: Parts,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        depth: int,
        buckets: Buckets,
        no_graphs: str = "the runner was made without graphs",
    ) -> None:
        """max_rows, max_tokens: of an unpadded step. depth: steps in flight at most. no_graphs: why no step is captured, or empty."""
        self.parts = parts
        self.device, self.ops, self.state = parts.device, parts.ops, parts.state
        self.buckets = buckets
        self.scratch_row = parts.table.max_rows
        rows = max([max_rows, *buckets.rows]) + 1
        tokens = max([max_tokens, rows, *buckets.tokens])
        self.longest_prompt = min(max_tokens, max_model_len)  # tokens of one row in one step
        self.packer = PlanPacker(rows, parts.table.max_patch_words)
        self.most_drafts = 0 if parts.drafting is None else parts.drafting.most
        tokens = max(tokens, rows * (1 + self.most_drafts))
        torch_device = self.device.torch_device
        self.buffers = StepBuffers(
            parts.needs, parts.dtype, parts.layouts, rows, tokens, max_model_len, self.packer, torch_device, self.most_drafts
        )
        self.drafting = None if parts.drafting is None else DraftPart(parts, parts.drafting, rows, tokens, max_model_len)
        self.slots = torch.arange(1 + self.most_drafts, device=torch_device)
        entries, words = depth + 1, record_words(self.most_drafts)
        self.ring = torch.zeros(entries, rows, words, dtype=torch.int32, device=self.device.torch_device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device.torch_device)
        self.plans = [self.device.pinned(4 * self.packer.capacity) for _ in range(entries)]
        self.results = [self.device.pinned(4 * rows * words) for _ in range(entries)]
        self.plan_words, self.result_words = ([buffer.array.view(np.int32) for buffer in ring] for ring in (self.plans, self.results))
        self.extras = Extras(self.device, entries, rows, parts.taps.record_bytes)
        num_top = parts.sampler.num_logprobs
        self.logprobs = StepLogprobs(self.device, self.ops, parts.table.columns, entries, rows, tokens, num_top, self.most_drafts)
        self.events: list[Event | None] = [None] * entries
        self.extra_events: list[Event | None] = [None] * entries
        self.launched = 0
        self.route: Route | None = None  # of the last launched step, while its rows are on the device
        self.warming_up = False
        self.max_tokens, self.max_model_len = max_tokens, max_model_len
        kinds = (Feature.GREEDY, Feature.MEDIA) if parts.needs.media is not None and parts.media_arena is not None else (Feature.GREEDY,)
        drafts = None if parts.drafting is None else DraftKinds(parts.drafting.policy, max_tokens, not parts.drafting.capture_problem)
        self.graphs = StepGraphs(self.device, buckets, self._closure, no_graphs, CAPTURED | parts.sampler.captured, kinds, drafts)
        self.media = self.buffers.media = media_steps(parts, entries, tokens)
        self.draft_groups = () if parts.drafting is None else parts.drafting.groups
        self.groups = [layout.name for layout in parts.layouts if layout.name not in self.draft_groups]
        self.caches = self._own_caches()
        self.layer_index = {g.group.name: {layer: i for i, layer in enumerate(g.group.layers)} for g in parts.layouts}

    def _own_caches(self) -> Mapping[str, torch.Tensor]:
        return ByGroup((name, self.parts.caches[name]) for name in self.groups)

    def warm_up(self) -> None:
        """Run steps of a dead row, one of each kind of tail, so that what cannot run fails at start-up and not at the first request."""
        plan = self._blank_plan()
        self.state.fill_dummy(self.buffers.batch(plan, self.buckets.shape(plan), self.parts.table.columns))
        sampler = self.parts.sampler
        tails = (Feature.GREEDY, Feature.PLAIN, Feature.PLAIN | Feature.FILTERED, EDITED | Feature.LOGPROBS, sampler.processed)
        kinds = [replace(plan, features=features) for features in dict.fromkeys(tails)]
        if self.most_drafts:
            kinds += [blank_plans.drafting(kind, self.parts.layouts, self.most_drafts) for kind in kinds]
        longest = self.longest_prompt
        prompts = [blank_plans.prompt(plan, self.parts.layouts, n) for n in sorted({min(FIRST_PROMPT, longest), longest})]
        plans = (*kinds, replace(plan, features=Feature.LOGPROBS), *prompts, self._large_plan(self.max_tokens))
        if self.media is not None:
            plans += tuple(replace(each, features=each.features | Feature.MEDIA) for each in prompts)
            kinds.append(replace(plan, features=Feature.MEDIA))
        self._build([*(partial(self._first, each) for each in plans), *sampler.loading()])
        self._rewind()
        self.warming_up = True
        for kind in kinds:
            records = self.collect(self.launch(replace(kind, features=kind.features | self.parts.taps.all_features))).records
            if records[0, Record.ROW] != self.scratch_row:
                raise PluginError(f"the step's record names row {records[0, Record.ROW]}, not {self.scratch_row} (operation write_record)")
        self.warming_up = False

    def _build(self, work: Sequence[Callable[[], None]]) -> None:
        """Let the device get ready what `work` will launch. It may run parts of it without the kernels that say where their inputs lie."""

        def reset() -> None:
            fill(self.buffers.sample_index, 0)
            if self.drafting is not None:
                fill(self.drafting.last_place, 0)

        self.device.build([partial(_in_order, reset, part) for part in work])

    def _first(self, plan: Plan) -> None:
        shape = self.buckets.shape(plan)
        self._pack(plan, shape, 0, rows=True)()
        self._computation(plan, shape, None, Asked.of(plan))()

    def run_large(self, num_tokens: int) -> None:
        """Run a step of as many rows as there can be, dead ones, with so many tokens and the tail that needs most memory, to its end.

        Without a graph, as `warm_up` does: nothing may keep memory of the cache that `use_caches` replaces.
        """
        plan = self._large_plan(num_tokens)
        self.warming_up = True
        self.collect(self.launch(plan))
        self.warming_up = False

    def _large_plan(self, num_tokens: int) -> Plan:
        bounds = num_tokens, self.scratch_row, self.max_model_len
        more = self.parts.taps.all_features | self.parts.sampler.processed
        plan = blank_plans.large(self._blank_plan(), self.parts.layouts, *bounds, more)
        return replace(plan, num_draft=self.most_drafts, num_next=self.most_drafts)

    def use_caches(self, caches: Mapping[str, torch.Tensor], backends: Mapping[str, AttentionBackend]) -> None:
        """Take other cache memory, by group. Only with nothing in flight and nothing captured."""
        self.parts = replace(self.parts, caches=caches, backends=backends)
        self.caches = self._own_caches()

    @contextmanager
    def instead(self, backends: Mapping[str, AttentionBackend]) -> Iterator[None]:
        """Run steps with other attention backends for some groups, without graphs. Begins and ends with nothing in flight."""
        own = self.parts
        self.parts, self.route, self.warming_up = replace(own, backends={**own.backends, **backends}), None, True
        try:
            yield
        finally:
            self.parts, self.route, self.warming_up = own, None, False

    def _blank_plan(self) -> Plan:
        return blank_plans.blank_row(self.parts.table, len(self.parts.layouts))

    def capture(self) -> GraphReport:
        """Capture what may come often, after `warm_up`. The counter is put back: entries written meanwhile are nobody's."""
        plan = self._blank_plan()
        self.route = None

        def stage(key: Key) -> None:
            upload = self._pack(plan, self._shape(key), 0, rows=True)
            self.device.launch(upload)
            self.device.synchronize()  # the buffer is written again for the next shape

        def first(key: Key) -> None:
            stage(key)
            self._closure(key)()

        def built(keys: Sequence[Key]) -> Sequence[Key]:
            self._build([partial(first, key) for key in (*keys, *self.graphs.tails)])
            bar: Sequence[Key] = tqdm(keys, desc="Capturing graphs", unit="graph", disable=not sys.stderr.isatty())
            return bar

        report = self.graphs.capture_all(stage, built)
        self._rewind()
        return report

    def launch(self, plan: Plan) -> Ticket:
        """Enqueue the step; never waits. An entry is free because at most `depth` tickets are open.

        Raises what the step raised while it was enqueued: it can be rolled back. Raises EngineError when its results cannot be fetched.
        """
        entry = self.launched % len(self.plans)
        assert self.events[entry] is None, "more steps in flight than the pipeline is deep"
        route, taps, asked = self.route, None, NOTHING
        known = route is not None and route.serves(plan)
        if route is None or not known:
            route = self._new_route(plan)
        compute = route.replay
        if compute is None:
            taps = self.parts.taps.active(plan.features)
            asked = Asked.of(plan)
            compute = self._computation(plan, route.shape, taps, asked)
        if self.media is not None and plan.media is not None:
            compute = partial(_in_order, self.media.pack(plan, route.shape.num_tokens, entry), compute)
        work = compute if known and plan.patch.empty else partial(_in_order, self._pack(plan, route.shape, entry, rows=not known), compute)
        self.route = None  # until it is known that the rows are there
        try:
            self.device.launch(work)
        except BaseException:
            self._rewind()
            self.device.synchronize()  # the next launch writes the buffer that a copy may be reading
            raise
        self.route = route
        self.launched += 1
        try:
            self.events[entry] = self.device.download(lambda: self.ring[entry, : plan.num_rows], self.results[entry])
            if taps is not None and taps.reports:
                self.extra_events[entry] = self.extras.download(entry, plan.num_rows)
            if int(plan.features) & LOGGED:
                self.logprobs.download(entry, plan, asked)
        except BaseException as error:
            raise EngineError(f"step {plan.step} runs, but its results cannot be fetched: {error}") from error
        return Ticket(plan, entry)

    def _new_route(self, plan: Plan) -> Route:
        shape = self.buckets.shape(plan)
        keys = () if self.warming_up else self.graphs.keys(plan, shape)
        works: list[Callable[[], None]] = [partial(self.graphs.run, key) for key in keys]
        if keys and self.drafting is not None and not self.graphs.with_drafts:
            batch = self.buffers.batch(plan, shape, self.parts.table.columns)
            works.append(self._draft_work(batch, plan.num_next, captured=False))
        return Route(plan, shape, partial(_in_order, *works) if keys else None)

    def _pack(self, plan: Plan, shape: Shape, entry: int, *, rows: bool) -> Callable[[], None]:
        """Put the plan's rows, if asked, and its patch into a pinned buffer. Returns the work that brings them to the device."""
        words = self.plan_words[entry]
        if rows:
            self.packer.pack_rows(plan, shape, self.scratch_row, words)
        start, end = 0 if rows else self.packer.patch_start, self.packer.pack_patch(plan.patch, words)
        return partial(self._upload, plan.patch, self.plans[entry], start, end)

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

    def collect(self, ticket: Ticket) -> Outcome:
        """Wait for the copy of this step's records, take them, and free the step's buffers."""
        event = self.events[ticket.entry]
        assert event is not None, "a ticket is collected once"
        event.wait()
        self.events[ticket.entry] = None
        rows, words = ticket.plan.num_rows, self.ring.shape[2]
        records = self.result_words[ticket.entry][: rows * words].reshape(rows, words).copy()
        self.device.release(self.results[ticket.entry])
        extra = None
        if (extra_event := self.extra_events[ticket.entry]) is not None:
            extra_event.wait()
            self.extra_events[ticket.entry] = None
            extra = self.extras.take(ticket.entry, ticket.plan.num_rows)
        logprobs = self.logprobs.take(ticket.entry, ticket.plan)
        self.device.release(self.plans[ticket.entry])
        if self.media is not None:
            self.media.release(ticket.entry)
        if self.device.poison:
            self.device.launch(lambda: self._poison(ticket.entry))
        return Outcome(ticket.plan, records, extra, logprobs)

    def _rewind(self) -> None:
        """Put the step counter back, however far the step that failed came."""
        launched = self.launched  # as it is now, not when the work runs
        self.device.launch(lambda: fill(self.counter, launched))

    def _poison(self, entry: int) -> None:
        self.ring[entry].fill_(POISON)
        self.extras.ring[entry].fill_(POISON & 0xFF)
        self.logprobs.poison(entry, POISON & 0xFF)

    def _upload(self, patch: Patch, packed: PinnedBuffer, start: int, end: int) -> None:
        """Copy the words start..end-1 of a packed plan to the device, and apply its patch."""
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


def fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def _in_order(*works: Callable[[], None]) -> None:
    for work in works:
        work()
