"""The runner: launch a planned step, collect its results. It holds what every model shares and nothing else.

`launch` packs what is new in the plan into a pinned buffer, hands the device one closure and one copy on the side stream, and returns. The
closure is the step, or the graph of one; what it does on the device is in `modelrunner.step_work`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from modelrunner import blank_plans
from modelrunner.attention import AttentionBackend
from modelrunner.batch import EDITED, EMPTY_PATCH, LOGGED, Feature, Outcome, Plan, Record, Ticket, record_words
from modelrunner.device import Event
from modelrunner.errors import EngineError, PluginError
from modelrunner.graphs import CAPTURED, DraftKinds, GraphReport, Key, StepGraphs
from modelrunner.model_state import Yes, answer_of
from modelrunner.runner_parts import Parts, Route
from modelrunner.step_buffers import Buckets, PlanPacker, Shape
from modelrunner.step_logprobs import NOTHING, Asked
from modelrunner.step_work import StepWork

FIRST_PROMPT = 32  # tokens of a prompt whose kernels are built with the first ones
CROWDS = (1, 4, 8, 32, 64, 128, 1024)  # rows of long steps with prompts: kernels for the last one or more of each
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
        self.device, self.state = parts.device, parts.state
        self.buckets = buckets
        self.scratch_row = parts.table.max_rows
        rows = max([max_rows, *buckets.rows]) + 1
        tokens = max([max_tokens, rows, *buckets.tokens])
        self.longest_prompt = min(max_tokens, max_model_len)  # tokens of one row in one step
        self.packer = PlanPacker(rows, parts.table.max_patch_words)
        self.most_drafts = 0 if parts.drafting is None else parts.drafting.most
        tokens = max(tokens, rows * (1 + self.most_drafts))
        entries, words = depth + 1, record_words(self.most_drafts)
        work = self.work = StepWork(parts, self.packer, entries, rows, tokens, max_model_len)
        self.buffers, self.drafting, self.media = work.buffers, work.drafting, work.media
        self.ring, self.extras, self.logprobs = work.ring, work.extras, work.logprobs
        self.plans = [self.device.pinned(4 * self.packer.capacity) for _ in range(entries)]
        self.results = [self.device.pinned(4 * rows * words) for _ in range(entries)]
        self.plan_words, self.result_words = ([buffer.array.view(np.int32) for buffer in ring] for ring in (self.plans, self.results))
        self.events: list[Event | None] = [None] * entries
        self.extra_events: list[Event | None] = [None] * entries
        self.launched = 0
        self._built: set[Key] = set()
        self.route: Route | None = None  # of the last launched step, while its rows are on the device
        self.max_tokens, self.max_model_len = max_tokens, max_model_len
        kinds = (Feature.GREEDY, Feature.MEDIA) if parts.needs.media is not None and parts.media_arena is not None else (Feature.GREEDY,)
        drafts = None if parts.drafting is None else DraftKinds(parts.drafting.policy, max_tokens, not parts.drafting.capture_problem)
        self.graphs = StepGraphs(self.device, buckets, self._closure, no_graphs, CAPTURED | parts.sampler.captured, kinds, drafts)

    @property
    def parts(self) -> Parts:
        """What the steps are made of now."""
        return self.work.parts

    def warm_up(self) -> None:
        """Run steps of a dead row, one of each kind of tail and a prompt, so that what cannot run fails at start-up and not at the first
        request."""
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
        plans += tuple(blank_plans.crowd(plan, self.parts.layouts, n, self.max_tokens, longest) for n in self._crowds())
        kinds.append(replace(prompts[0], features=Feature.GREEDY))
        self._build_all(plan, plans)
        self._rewind()
        self.work.warming_up = True
        for kind in kinds:
            records = self.collect(self.launch(replace(kind, features=kind.features | self.parts.taps.all_features))).records
            if records[0, Record.ROW] != self.scratch_row:
                raise PluginError(f"the step's record names row {records[0, Record.ROW]}, not {self.scratch_row} (operation write_record)")
        self.work.warming_up = False
        if isinstance(answer_of(self.state, "taps"), Yes):
            self.work.tap_names.require_all()

    def _crowds(self) -> Sequence[int]:
        """Rows of long steps without a graph, some for each kind of kernel that they have."""
        return [n for n in CROWDS if n <= min(self.scratch_row, self.max_tokens // 2)]

    def _build_all(self, blank: Plan, plans: Sequence[Plan]) -> None:
        """Build what steps launch, those of `plans` and those that are captured."""
        keys, works = (*self.graphs.first, *self.graphs.rare), [partial(self._first, each) for each in plans]
        # But for the tail; and for what a drafter may do otherwise where tokens are drawn.
        alike = {key: key._replace(features=Feature.GREEDY) for key in keys if key.part == "step" and self.drafting is None}
        shown = [key.tail if alike.get(key, key) != key and alike[key] in alike else key for key in keys]
        went = self._build([*(partial(self._first_of, blank, key) for key in shown), *works, *self.parts.sampler.loading()])
        ready = dict(zip(keys, went, strict=False))
        self._built = {key for key in keys if ready[key] and ready.get(alike.get(key, key), True)}

    def _build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool]:
        """Let the device get ready what `work` will launch. It may run parts of it without the kernels that say where their inputs lie.
        Returns what needs no first run."""

        def reset() -> None:
            fill(self.buffers.sample_index, 0)
            if self.drafting is not None:
                fill(self.drafting.last_place, 0)

        went = self.device.build([partial(_in_order, reset, part) for part in work])
        if went is not None and len(went) != len(work):
            raise PluginError(f"build of device {self.device.name!r} answered for {len(went)} pieces of work; it was given {len(work)}")
        return [False] * len(work) if went is None else went

    def _first(self, plan: Plan) -> None:
        shape = self.buckets.shape(plan)
        self._stage(plan, shape)
        self.work.computation(plan, shape, None, Asked.of(plan))()

    def _first_of(self, plan: Plan, key: Key) -> None:
        self._stage(plan, self._shape(key))
        self._closure(key)()

    def _stage(self, plan: Plan, shape: Shape) -> None:
        """Put `plan` into the input buffers, padded to `shape`."""
        self.device.launch(self._pack(plan, shape, 0, rows=True))
        self.device.synchronize()  # the pinned buffer is written again for the next one

    def run_large(self, num_tokens: int) -> None:
        """Run a step of as many rows as there can be, dead ones, with so many tokens and the tail that needs most memory, to its end.

        Without a graph, as `warm_up` does: nothing may keep memory of the cache that `use_caches` replaces.
        """
        plan = self._large_plan(num_tokens)
        self.work.warming_up = True
        self.collect(self.launch(plan))
        self.work.warming_up = False

    def _large_plan(self, num_tokens: int) -> Plan:
        bounds = num_tokens, self.scratch_row, self.max_model_len
        more = self.parts.taps.all_features | self.parts.sampler.processed
        plan = blank_plans.large(self._blank_plan(), self.parts.layouts, *bounds, more)
        return replace(plan, num_draft=self.most_drafts, num_next=self.most_drafts)

    def use_caches(self, caches: Mapping[str, torch.Tensor], backends: Mapping[str, AttentionBackend]) -> None:
        """Take other cache memory, by group. Only with nothing in flight and nothing captured."""
        self.work.use_caches(caches, backends)

    @contextmanager
    def instead(self, backends: Mapping[str, AttentionBackend]) -> Iterator[None]:
        """Run steps with other attention backends for some groups, without graphs. Begins and ends with nothing in flight."""
        own = self.parts
        self.work.parts, self.route, self.work.warming_up = replace(own, backends={**own.backends, **backends}), None, True
        try:
            yield
        finally:
            self.work.parts, self.route, self.work.warming_up = own, None, False

    def _blank_plan(self) -> Plan:
        return blank_plans.blank_row(self.parts.table, len(self.parts.layouts))

    def capture(self) -> GraphReport:
        """Capture what may come often, after `warm_up`. The counter is put back: entries written meanwhile are nobody's."""
        plan = self._blank_plan()
        self.route = None

        def bar(keys: Sequence[Key]) -> Iterable[Key]:
            shown: Iterable[Key] = tqdm(keys, desc="Capturing graphs", unit="graph", disable=not sys.stderr.isatty())
            return shown

        report = self.graphs.capture_all(lambda key: self._stage(plan, self._shape(key)), bar, self._built)
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
            compute = self.work.computation(plan, route.shape, taps, asked)
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
        keys = () if self.work.warming_up else self.graphs.keys(plan, shape)
        works: list[Callable[[], None]] = [partial(self.graphs.run, key) for key in keys]
        if keys and self.drafting is not None and not self.graphs.with_drafts:
            works.append(self.work.draft_work(plan, shape, captured=False))
        return Route(plan, shape, partial(_in_order, *works) if keys else None)

    def _pack(self, plan: Plan, shape: Shape, entry: int, *, rows: bool) -> Callable[[], None]:
        """Put the plan's rows, if asked, and its patch into a pinned buffer. Returns the work that brings them to the device."""
        words = self.plan_words[entry]
        if rows:
            self.packer.pack_rows(plan, shape, self.scratch_row, words)
        start, end = 0 if rows else self.packer.patch_start, self.packer.pack_patch(plan.patch, words)
        return partial(self.work.upload, plan.patch, self.plans[entry], start, end)

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
            return self.work.computation(plan, shape, None, NOTHING, captured=True)
        if key.part == "draft":
            return self.work.draft_work(plan, shape, captured=True)
        return self.work.tail_work(plan, shape) if key.part == "tail" else self.work.body_work(plan, shape)

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
        self.device.launch(lambda: fill(self.work.counter, launched))

    def _poison(self, entry: int) -> None:
        self.ring[entry].fill_(POISON)
        self.extras.ring[entry].fill_(POISON & 0xFF)
        self.logprobs.poison(entry, POISON & 0xFF)


def fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def _in_order(*works: Callable[[], None]) -> None:
    for work in works:
        work()
