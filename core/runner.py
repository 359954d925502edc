"""The runner: launch a planned step, collect its results. It holds what every model shares and nothing else.

`launch` packs the plan into a pinned buffer, hands the device one closure and one copy on the side stream, and returns. The closure is the
step: patch, gather, embed, layers, hidden states at the sampling positions (the body); head, sampling, state update, record (the tail).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from modelrunner.attention import AttentionBackend, AttentionMeta, BoundAttention, ByGroup, attention_meta
from modelrunner.batch import EMPTY_PATCH, Batch, Feature, Outcome, Plan, Record, Ticket, record_words
from modelrunner.device import Device, Event, PinnedBuffer
from modelrunner.errors import EngineError, PluginError
from modelrunner.graphs import GraphReport, Key, StepGraphs
from modelrunner.model_state import ModelState, Needs, Tap
from modelrunner.ops import Ops
from modelrunner.page_pool import GroupLayout
from modelrunner.request_table import RequestTable
from modelrunner.sampler import Sampler
from modelrunner.step_buffers import Buckets, PlanPacker, Shape, StepBuffers
from modelrunner.tap_set import ActiveTaps, TapSet

POISON = -0x5A5A5A5B  # what a released ring entry holds on a testing device: no row, no token


@dataclass(frozen=True)
class Parts:
    """What a runner is put together from, each chosen or built at start-up."""

    device: Device
    ops: Ops
    state: ModelState
    needs: Needs
    dtype: torch.dtype
    sampler: Sampler
    table: RequestTable
    layouts: Sequence[GroupLayout]
    caches: Mapping[str, torch.Tensor]
    backends: Mapping[str, AttentionBackend]
    taps: TapSet


class Extras:
    """The way of what taps report: a device ring of byte records beside the ring of step records, and a pinned buffer per entry."""

    def __init__(self, device: Device, entries: int, rows: int, record_bytes: int) -> None:
        self.device = device
        self.packed = torch.zeros(rows, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.ring = torch.zeros(entries, rows, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.results = [device.pinned(rows * record_bytes) for _ in range(entries)] if record_bytes else []

    def write(self, active: ActiveTaps, batch: Batch, counter: torch.Tensor) -> None:
        """D. Put the step's results into the ring entry that `counter` names."""
        packed = self.packed[: batch.num_rows]
        active.write(batch, packed)
        self.ring[:, : batch.num_rows].index_copy_(0, counter % self.ring.shape[0], packed.unsqueeze(0))

    def download(self, entry: int, num_rows: int) -> Event:
        return self.device.download(lambda: self.ring[entry, :num_rows], self.results[entry])

    def take(self, entry: int, num_rows: int) -> npt.NDArray[np.uint8]:
        """A copy of what was downloaded: [num_rows, record bytes]. Frees the buffer."""
        size = self.ring.shape[2]
        records = self.results[entry].array[: num_rows * size].reshape(num_rows, size).copy()
        self.device.release(self.results[entry])
        return records


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
        self.packer = PlanPacker(rows, parts.table.max_patch_words)
        self.buffers = StepBuffers(
            parts.needs, parts.dtype, parts.layouts, rows, tokens, max_model_len, self.packer, self.device.torch_device
        )
        entries, words = depth + 1, record_words(num_draft=0)
        self.ring = torch.zeros(entries, rows, words, dtype=torch.int32, device=self.device.torch_device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device.torch_device)
        self.plans = [self.device.pinned(4 * self.packer.capacity) for _ in range(entries)]
        self.results = [self.device.pinned(4 * rows * words) for _ in range(entries)]
        self.extras = Extras(self.device, entries, rows, parts.taps.record_bytes)
        self.events: list[Event | None] = [None] * entries
        self.extra_events: list[Event | None] = [None] * entries
        self.launched = 0
        self.warming_up = False
        self.max_model_len = max_model_len
        self.graphs = StepGraphs(self.device, buckets, self._closure, no_graphs)
        self.caches = ByGroup(parts.caches)
        self.layer_index = {g.group.name: {layer: i for i, layer in enumerate(g.group.layers)} for g in parts.layouts}

    def warm_up(self) -> None:
        """Run steps of a dead row, one of each kind of tail, so that what cannot run fails at start-up and not at the first request."""
        plan = self._blank_plan()
        self.state.fill_dummy(self.buffers.batch(plan, self.buckets.shape(plan), self.parts.table.columns))
        self.warming_up = True
        for features in (Feature.GREEDY, Feature.PLAIN, Feature.PLAIN | Feature.FILTERED):
            records = self.collect(self.launch(replace(plan, features=features | self.parts.taps.all_features))).records
            if records[0, Record.ROW] != self.scratch_row:
                raise PluginError(f"the step's record names row {records[0, Record.ROW]}, not {self.scratch_row} (operation write_record)")
        self.warming_up = False

    def run_large(self, num_tokens: int) -> None:
        """Run a step of as many rows as there can be, dead ones, with so many tokens and the tail that needs most memory, to its end.

        Without a graph, as `warm_up` does: nothing may keep memory of the cache that `use_caches` replaces.
        """
        blank, rows = self._blank_plan(), min(self.scratch_row, num_tokens)
        num_query = np.ones(rows, np.int32)
        num_query[0] += num_tokens - rows
        plan = replace(
            blank,
            rows=np.full(rows, self.scratch_row, np.int32),
            generations=np.full(rows, -1, np.int32),
            num_query=num_query,
            num_decode=0,
            num_tokens=num_tokens,
            max_query=int(num_query[0]),
            max_seq_len=self.max_model_len,
            table_pages=tuple(layout.pages_for(self.max_model_len) for layout in self.parts.layouts),
            features=Feature.PLAIN | Feature.FILTERED | self.parts.taps.all_features,
        )
        self.warming_up = True
        self.collect(self.launch(plan))
        self.warming_up = False

    def use_caches(self, caches: Mapping[str, torch.Tensor], backends: Mapping[str, AttentionBackend]) -> None:
        """Take other cache memory, by group. Only with nothing in flight and nothing captured."""
        self.parts = replace(self.parts, caches=caches, backends=backends)
        self.caches = ByGroup(caches)

    def _blank_plan(self) -> Plan:
        """A step of a dead row, the scratch row, whose columns have their defaults; it goes through all operations and changes nothing."""
        one = np.ones(1, np.int32)
        blank = self.parts.table.builder()
        blank.row(self.scratch_row, {})
        return Plan(
            step=-1,
            rows=one * self.scratch_row,
            generations=-one,
            num_query=one,
            patch=blank.build(),
            num_decode=1,
            num_tokens=1,
            max_query=1,
            max_seq_len=1,
            table_pages=(1,) * len(self.parts.layouts),
        )

    def capture(self) -> GraphReport:
        """Capture what may come often, after `warm_up`. The counter is put back: entries written meanwhile are nobody's."""
        plan, staged = self._blank_plan(), self.plans[0]

        def stage(key: Key) -> None:
            words = self.packer.pack(plan, self._shape(key), self.scratch_row, _int32(staged))
            self.device.launch(lambda: self._upload(plan, staged, words))
            self.device.synchronize()  # the buffer is written again for the next shape

        bar = partial(tqdm, desc="Capturing graphs", unit="graph", disable=not sys.stderr.isatty())
        report = self.graphs.capture_all(stage, bar)
        self._rewind()
        return report

    def launch(self, plan: Plan) -> Ticket:
        """Enqueue the step; never waits. An entry is free because at most `depth` tickets are open.

        Raises what the step raised while it was enqueued: it can be rolled back. Raises EngineError when its results cannot be fetched.
        """
        entry = self.launched % len(self.plans)
        assert self.events[entry] is None, "more steps in flight than the pipeline is deep"
        shape = self.buckets.shape(plan)
        words = self.packer.pack(plan, shape, self.scratch_row, _int32(self.plans[entry]))
        keys, taps = () if self.warming_up else self.graphs.keys(plan, shape), None
        if keys:
            compute: Callable[[], None] = partial(self._replay, keys)
        else:
            taps = self.parts.taps.active(plan.features)
            compute = self._computation(plan, shape, taps)
        try:
            self.device.launch(lambda: self._step(plan, self.plans[entry], words, compute))
        except BaseException:
            self._rewind()
            raise
        self.launched += 1
        try:
            self.events[entry] = self.device.download(lambda: self.ring[entry, : plan.num_rows], self.results[entry])
            if taps is not None and taps.reports:
                self.extra_events[entry] = self.extras.download(entry, plan.num_rows)
        except BaseException as error:
            raise EngineError(f"step {plan.step} runs, but its results cannot be fetched: {error}") from error
        return Ticket(plan, entry)

    def _replay(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.graphs.run(key)

    def _shape(self, key: Key) -> Shape:
        """The shape of every step that runs as `key`. Which rows of a body decode is for the device to see."""
        if key.part == "body":
            rows = self.buckets.body_rows(key.size)
            return Shape(rows, key.size, 0, key.size, rows)
        return Shape(key.size, key.size, key.size, 1, key.size)

    def _closure(self, key: Key) -> Callable[[], None]:
        """A step of decode rows, or part of a step with prompts, with the bounds of any such step, for a graph."""
        shape, length = self._shape(key), self.max_model_len
        rows = np.full(shape.num_rows, self.scratch_row, np.int32)
        pages = tuple(layout.pages_for(length) for layout in self.parts.layouts)
        plan = Plan(-1, rows, rows, rows, EMPTY_PATCH, shape.num_decode, shape.num_tokens, shape.max_query, length, pages, key.features)
        if key.part == "step":
            return self._computation(plan, shape, None)
        sampled, columns = self.buffers.sampled[: shape.tail_rows], self.parts.table.columns
        if key.part == "tail":
            return partial(self._tail, self.buffers.tail(plan, shape, columns), sampled)
        batch = self.buffers.batch(plan, shape, columns)
        return partial(self._captured_body, batch, self._attention(batch), sampled)

    def _captured_body(self, batch: Batch, attention: Mapping[str, BoundAttention], sampled: torch.Tensor) -> None:
        self._inputs(batch)
        torch.index_select(self._body(batch, attention, no_tap), 0, batch.sample_index, out=sampled)

    def _computation(self, plan: Plan, shape: Shape, taps: ActiveTaps | None) -> Callable[[], None]:
        """Everything that a step does after its inputs are uploaded. Views and metadata are made here, on the host."""
        columns = self.parts.table.columns
        batch = self.buffers.batch(plan, shape, columns)
        tail = batch if shape.num_decode == shape.num_rows else self.buffers.tail(plan, shape, columns)
        attention = self._attention(batch)
        return lambda: self._compute(batch, tail, attention, taps)

    def _attention(self, batch: Batch) -> Mapping[str, BoundAttention]:
        return ByGroup(
            (name, BoundAttention(backend, self.layer_index[name], self._metadata(backend, batch)))
            for name, backend in self.parts.backends.items()
        )

    def _metadata(self, backend: AttentionBackend, batch: Batch) -> AttentionMeta:
        return self.state.attention_metadata(backend.group, batch, attention_meta(backend.group, batch))

    def collect(self, ticket: Ticket) -> Outcome:
        """Wait for the copy of this step's records, take them, and free the step's buffers."""
        event = self.events[ticket.entry]
        assert event is not None, "a ticket is collected once"
        event.wait()
        self.events[ticket.entry] = None
        records = _int32(self.results[ticket.entry])[: ticket.plan.num_rows * self.ring.shape[2]].reshape(ticket.plan.num_rows, -1).copy()
        self.device.release(self.results[ticket.entry])
        extra = None
        if (extra_event := self.extra_events[ticket.entry]) is not None:
            extra_event.wait()
            self.extra_events[ticket.entry] = None
            extra = self.extras.take(ticket.entry, ticket.plan.num_rows)
        self.device.release(self.plans[ticket.entry])
        if self.device.poison:
            self.device.launch(lambda: self._poison(ticket.entry))
        return Outcome(ticket.plan, records, extra)

    def _rewind(self) -> None:
        """Put the step counter back, however far the step that failed came."""
        launched = self.launched  # as it is now, not when the work runs
        self.device.launch(lambda: fill(self.counter, launched))

    def _poison(self, entry: int) -> None:
        self.ring[entry].fill_(POISON)
        self.extras.ring[entry].fill_(POISON & 0xFF)

    def _step(self, plan: Plan, staged: PinnedBuffer, words: int, compute: Callable[[], None]) -> None:
        with torch.inference_mode():
            self._upload(plan, staged, words)
            compute()

    def _upload(self, plan: Plan, staged: PinnedBuffer, words: int) -> None:
        """Copy the packed plan to the device and apply its patch."""
        buffers = self.buffers
        buffers.staging[:words].copy_(staged.tensor[: 4 * words].view(torch.int32), non_blocking=True)
        if not plan.patch.empty:
            self.ops.apply_patch(self.parts.table.arena, *buffers.patch(plan.patch.dst.size, plan.patch.words.size))

    def _compute(self, batch: Batch, tail: Batch, attention: Mapping[str, BoundAttention], taps: ActiveTaps | None) -> None:
        self._inputs(batch)
        hidden = self._body(batch, attention, no_tap if taps is None else taps.bind(batch))
        if taps is not None and taps.reports:
            self.extras.write(taps, batch, self.counter)
        if tail is not batch:  # otherwise a row's only token is the one that it samples from
            hidden = hidden.index_select(0, batch.sample_index[: tail.num_rows])
        self._tail(tail, hidden)

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
        )

    def _body(self, batch: Batch, attention: Mapping[str, BoundAttention], tap: Tap) -> torch.Tensor:
        """Embeddings and layers; returns the hidden states, [T, H]."""
        state = self.state
        state.before_forward(batch)
        hidden = self.buffers.hidden[: batch.num_tokens]
        for bound in attention.values():
            bound.begin()
        state.embed(batch, hidden)
        positions = state.positions(batch, batch.positions)
        hidden = state.forward(hidden, positions, attention, self.caches, tap)
        if self.warming_up:
            self._require("forward", hidden, batch.num_tokens, self.parts.needs.hidden_size)
        return hidden

    def _tail(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Head, sampling, state update and record."""
        columns = self.parts.table.columns
        rows, generations, _, _ = self.buffers.row_inputs(batch.num_rows)
        logits = self.state.logits(hidden)
        if self.warming_up:
            self._require("logits", logits, batch.num_rows, self.parts.needs.vocab_size)
        tokens, num_tokens, ok = self.parts.sampler.sample(logits, batch)
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
        )

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


def _int32(buffer: PinnedBuffer) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return buffer.array.view(np.int32)
