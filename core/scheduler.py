"""Decides what each step runs, and follows what each step did. Host only, numpy only.

The idea: a request owns a row from admission to its end or its preemption. `plan` gives every running row one more token, spends what is
left of the token budget on unfinished prompts, then on new requests; `commit` reads the records of a step that ran (see `commits`). Between
the two, several steps may be in flight, so each row has two sets of counters (see `rows`). Work per step depends on what changes, not on
how many rows run: while all rows decode and nobody comes or goes, steps are repeated (see `steady`); whatever else happens settles them
first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from modelrunner.admission import Admission
from modelrunner.batch import EMPTY_PATCH, Drain, Outcome, PatchSink, Plan
from modelrunner.commits import Commits
from modelrunner.draft_policy import NO_DRAFTS, DraftPolicy
from modelrunner.no_media import NoMedia
from modelrunner.page_pool import GroupLayout, Int32Array, PagePool
from modelrunner.request import Request, Status
from modelrunner.rows import Growth, HostRows
from modelrunner.steady import Steady
from modelrunner.steady_drafts import SteadyDrafts
from modelrunner.step_books import Committed, Draft, Stats, Undo, note_growth
from modelrunner.token_budget import TokenBudget
from modelrunner.waiting import Deadlines, Entry


class Scheduler:
    """See the module. Not thread-safe; `plan` and `commit` are called in step order.

    row_values: plain and seated column values of a request, by column name (a seated column's value is its elements).
    on_admit(row, request, resumed) gives further values, on_remove tells that the request left the row. seats: capacity of each seated
    column. max_batched_tokens, max_mixed_tokens, usual_context: see `TokenBudget`; the latter two only with chunked prefill. depth: steps
    in flight at most. media: what the requests' media are encoded by. drafting: how many drafts steps have. shifted_cache: a page of some
    group depends on the token behind its end.
    """

    def __init__(
        self,
        *,
        groups: Sequence[GroupLayout],
        pool: PagePool,
        builder: Callable[[], PatchSink],
        row_values: Callable[[Request], Mapping[str, Any]],
        on_admit: Callable[[int, Request, bool], Mapping[str, Any]],
        on_remove: Callable[[int, Request], None],
        max_rows: int,
        max_batched_tokens: int,
        max_model_len: int,
        max_mixed_tokens: int | None = None,
        usual_context: int | None = None,
        policy: Literal["fcfs", "priority"] = "fcfs",
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        seats: Mapping[str, int] | None = None,
        depth: int = 2,
        clock: Callable[[], float] = time.monotonic,
        cache_seed: bytes = b"",
        media: NoMedia | None = None,
        drafting: DraftPolicy = NO_DRAFTS,
        shifted_cache: bool = False,
    ) -> None:
        self.pool = pool
        self.depth = depth
        self._stats = Stats(drafted_at=[0] * drafting.most, accepted_at=[0] * drafting.most)
        self._rows = HostRows(groups, max_rows, max_model_len, drafting)
        self.admission = Admission(
            self._rows, pool, seats or {}, row_values, on_admit, on_remove,
            max_batched_tokens=max_batched_tokens, by_priority=policy == "priority",
            chunked=chunked_prefill, caching=prefix_caching, cache_seed=cache_seed, shifted=shifted_cache, media=media,
        )  # fmt: skip
        self.commits = Commits(self._rows, pool, self.admission, self._stats, clock)
        self._builder = builder
        self._budget = TokenBudget(max_batched_tokens, max_mixed_tokens if chunked_prefill else None, usual_context)
        self._deadlines = Deadlines()
        self._running: Int32Array = np.empty(0, np.int32)  # rows of running requests, in order of admission
        self._repeatable: Plan | None = None  # the newest plan, if all running rows decode in it, and nobody came or went since
        self._steady: Steady | SteadyDrafts | None = None  # repeats it
        self._in_flight: deque[Plan] = deque()
        self._undo: Undo | None = None
        self._step = 0
        self.num_held = 0  # rows left out of the newest plan because the mask of their next token was not there

    @property
    def rows(self) -> HostRows:
        """Counters of every row, up to date. Ask again after a plan or a commit."""
        self._settle()
        return self._rows

    @property
    def stats(self) -> Stats:
        """Counters since start, up to date. Ask again after a commit."""
        if self._steady is not None:
            self._steady.count()
        return self._stats

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run; nothing is kept of it then."""
        self.admission.add(request)
        self._deadlines.add(request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None, keep_output: int | None = None) -> bool:
        """End a request by the host's decision, whatever it is doing. Records of it that come later are dropped.

        keep_output: cut the output to that many tokens. A request that has ended already is only cut, and takes over the reason then
        (its last token completed a stop string). Returns whether it was still going.
        """
        going = request.status is not Status.FINISHED
        if going:
            if request.status is Status.RUNNING:
                self._settle()
                self.admission.release(request)
                self._refresh_running()
            self.commits.end(request, reason, stop_reason)
        if keep_output is not None:
            del request.output_token_ids[keep_output:]
            request.finish_reason, request.stop_reason = reason, stop_reason
        return going

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed (`timeout`). Returns them, and those that a plugin refused at admission (`error`)."""
        late = self._deadlines.passed(now)
        for request in late:
            self.finish(request, "timeout")
        refused, self.admission.refused = self.admission.refused, []
        return late + refused

    def preempt(self, request_id: str) -> bool:
        """Take the row from a running request; it waits for another. Only with nothing in flight. Returns whether it was running."""
        if self._in_flight:
            raise RuntimeError(
                f"request {request_id!r} cannot be preempted with {len(self._in_flight)} steps in flight; collect them first"
            )
        entry = self.admission.entries.get(request_id)
        if entry is None or entry.request.status is not Status.RUNNING:
            return False
        self._preempt(entry)
        return True

    def tokens_of(self, request: Request) -> Int32Array:
        """Committed output tokens of a request: [n] int32, a view while it runs."""
        if request.status is Status.RUNNING:
            return self.rows.output(request.row)
        return np.array(request.output_token_ids, np.int32)

    @property
    def num_guided(self) -> int:
        """Rows whose requests have guides."""
        return self._rows.num_guided

    def guided(self, rows: Int32Array) -> list[Request]:
        """Requests with guides that hold one of `rows`."""
        entries = [self.admission.holders[row] for row in rows[self._rows.guided[rows]].tolist()]
        return [entry.request for entry in entries if entry is not None]

    def ready(self, request: Request) -> None:
        """What the request's next token waited for is there, its mask or its media: it can be planned, or admitted."""
        if request.status is Status.RUNNING:
            self._rows.held[request.row] = False
        else:
            self.admission.unpark(request)

    def revalue(self, request: Request) -> None:
        """See `Admission.revalue`."""
        self.admission.revalue(request)

    def request_at(self, row: int) -> Request | None:
        """The request that holds `row`."""
        entry = self.admission.holders[row]
        return entry.request if entry else None

    @property
    def max_tokens(self) -> int:
        """Longest request, prompt and output in tokens, that the cache can hold."""
        return self.admission.max_tokens()

    @property
    def num_waiting(self) -> int:
        return len(self.admission.queue) + len(self.admission.parked) + len(self.admission.forks)

    @property
    def num_running(self) -> int:
        return int(self._running.size)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet committed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, is in flight, or is to be reported by `expire`."""
        return bool(self.num_waiting or self._running.size or self._in_flight or self.admission.refused)

    def reset_prefix_cache(self, cache_seed: bytes | None = None) -> None:
        """Forget all cached prefixes. cache_seed: names the weights from now on. Pages being computed now are not cached either."""
        self.admission.reset_cache(cache_seed)

    # ---- plan ----------------------------------------------------------------------------------------------------

    def plan(self, drained: bool = False) -> Plan | Drain | None:
        """Decide the next step. None: nothing can run now. Drain: pages ran out while steps are in flight; collect them all and call
        again with `drained`. With nothing in flight it preempts instead, until the rest fits."""
        assert len(self._in_flight) < (1 if drained else self.depth), f"{len(self._in_flight)} steps are in flight; collect first"
        self.admission.reclaim_rows(self._in_flight[0].step if self._in_flight else self._step)
        if self._repeatable is not None and (again := self._repeat(self._repeatable)) is not None:
            return again
        self._disturb()
        while True:
            chosen = self._rows.select(self._running, self._budget, len(self.admission.queue), self._step)
            rows, counts, num_decode, num_draft = chosen
            upper, limit = self._rows.computed_upper[rows] + counts, self._rows.limit[rows]
            deficits = [table.lacks(rows, upper, limit) for table in self._rows.tables]
            missing = sum(int(d.sum()) for d in deficits)
            if missing <= self.pool.available:
                break
            if self._in_flight:
                return Drain(f"{missing} cache pages are needed and {self.pool.available} available")
            self._preempt(self._victim())
        if num_draft and missing:
            deficits = self._rows.early(rows, upper, limit, num_decode, deficits, self.pool.available)
        cached = int(self._rows.computed_upper[rows[:num_decode]].sum())
        tokens = self._budget.tokens(num_decode, rows.size - num_decode + len(self.admission.queue), cached, 1 + num_draft)
        draft = Draft(self._builder(), tokens, num_decode, num_draft)
        draft.grow(self._rows, rows, deficits, self.pool)
        self.num_held = int(self._rows.held.sum()) if self._rows.num_guided else 0
        draft.take(self._rows, rows, counts)
        draft.spend(counts)
        if self._rows.num_guided:
            self._send_masks(draft, rows)
        self._admit(draft)
        return self._seal(draft)

    def _send_masks(self, draft: Draft, rows: Int32Array) -> None:
        """Put the masks of the planned rows that sample into the patch. (A row that is admitted brings its first one with it.)"""
        for row in rows[self._rows.held[rows]].tolist():
            entry = self.admission.holders[row]
            assert entry is not None, f"row {row} has no request"
            guide = entry.request.guide
            assert guide is not None, f"row {row} is held, and its request {entry.request.id!r} has no guide"
            draft.builder.line(guide.column, entry.seats[guide.column], guide.mask)

    def _repeat(self, first: Plan) -> Plan | None:
        """The steady path: the plan of before once more, or None when something about it would change."""
        if self.admission.candidate(self._budget.most - first.num_tokens) is not None:
            return None
        steady = self._steady = self._steady or self._steady_from(first)
        if steady.left <= 0 or (steady.wavering and first.num_draft != self._drafts_in(self._step)):
            return None
        growths: list[Growth] = []
        patch = EMPTY_PATCH
        if due := steady.due(self.pool.available):
            if sum([rows.size for _, rows in due]) > self.pool.available:
                return None
            builder = self._builder()
            for table, rows in due:
                growth = table.grow_one(rows, self.pool)
                growths.append(growth)
                note_growth(builder, table.layout.name, growth)
            patch = builder.build()
        plan = steady.plan(self._step, patch)
        self._undo = Undo(plan, steady.all, growths, [], self._step - 1)
        self._in_flight.append(plan)
        self._step += 1
        return plan

    def _steady_from(self, first: Plan) -> Steady | SteadyDrafts:
        return SteadyDrafts(self._rows, first, self._stats) if first.num_draft else Steady(self._rows, first)

    def _settle(self) -> None:
        """Write down what the steady path has not written yet: whoever reads rows needs it."""
        if self._steady is not None:
            self._steady.settle()

    def _disturb(self) -> None:
        """The next plan differs from the last one."""
        self._settle()
        self._repeatable = self._steady = None

    def _admit(self, draft: Draft) -> None:
        entries, chunks, sampled = [], [], []
        while (admitted := self.admission.admit_next(draft.budget, draft.builder)) is not None:
            entry, chunk = admitted
            entries.append(entry)
            chunks.append(chunk)
            sampled.append(self._rows.advance_one(entry.request.row, chunk))
            draft.budget -= chunk
            self._stats.admitted(entry, 1)
        if entries:
            self._running = np.concatenate([self._running, draft.admit(entries, chunks, sampled)])

    def _seal(self, draft: Draft) -> Plan | None:
        plan = draft.plan(self._step, self._rows, self._num_next(draft))
        if plan is None:
            return None
        if self._rows.num_media:
            plan = self.admission.media.attach(plan)
        self._stats.held += self.num_held
        table = self._rows
        self._undo = Undo(plan, np.concatenate(draft.sampled), draft.growths, draft.admitted, table.last_ticket[plan.rows])
        table.last_ticket[plan.rows] = plan.step
        self._in_flight.append(plan)
        self._step += 1
        known = plan.num_draft or not any(each.num_draft for each in self._in_flight)  # how far each row will be, where none drafts
        usual = not table.num_guided and not table.num_media and known
        if plan.num_decode == self._running.size and usual and plan.num_draft == plan.num_next:
            self._repeatable = plan
        return plan

    def _drafts_in(self, step: int) -> int:
        """Drafts of a row in a step in which all running rows decode."""
        return self._rows.policy.drafts_in(self._running.size, self._budget.most, step)

    def _num_next(self, draft: Draft) -> int:
        """Drafts to be made after this step, for the next one."""
        most = self._drafts_in(self._step + 1)
        return most if most and any(self._rows.drafts[rows].any() for rows, _ in draft.chunks) else 0

    def rollback(self, plan: Plan) -> None:
        """Undo the newest plan, whose launch raised. Those it admitted wait again, in their old place; nothing committed is lost."""
        undo = self._undo
        if undo is None or undo.plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the newest plan, or its launch did not fail; only that one can be rolled back")
        self._disturb()
        self._undo = None
        self._in_flight.pop()
        self._step -= 1
        table = self._rows
        table.last_ticket[plan.rows] = undo.last_ticket
        alive = self.commits.alive(plan)
        rows = plan.rows[alive]
        table.retreat(rows, plan.num_query[alive], int(alive[: plan.num_decode].sum()), undo.sampled[alive])
        for growth in undo.growths:
            table.tables[growth.group].shrink(growth, np.isin(growth.rows, plan.rows[~alive]), self.pool)
        for entry in undo.admitted:
            self._stats.admitted(entry, -1)
            if entry.request.status is Status.RUNNING:
                self.admission.release(entry.request)
                self.admission.requeue(entry)
        self._refresh_running()

    # ---- commit --------------------------------------------------------------------------------------------------

    def commit(self, outcome: Outcome) -> Committed:
        """Take in the records of the oldest step in flight. Those of requests that the host ended meanwhile are dropped."""
        plan = outcome.plan
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError(f"step {plan.step} was committed out of order; the oldest in flight comes first")
        self._in_flight.popleft()
        if self._undo is not None and self._undo.plan is plan:
            self._undo = None
        self._stats.steps += 1
        if self._steady is not None and self._steady.commit(plan, outcome.records):
            return self.commits.steady(outcome, self._steady)
        self._settle()
        committed = self.commits.general(outcome)
        if committed.finished:
            self._refresh_running()
        return committed

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _refresh_running(self) -> None:
        """Some of the running rows are free now."""
        self._disturb()
        self._running = self._running[self._rows.active[self._running]]

    def _victim(self) -> Entry:
        """The running request that gives way: lowest priority first, then the newest."""
        holders = self.admission.holders
        entries: list[Entry] = [entry for row in self._running.tolist() if (entry := holders[row]) is not None]
        assert len(entries) > 1, "one request alone does not fit into the page pool; it should have been refused"
        victim: Entry = max(entries, key=lambda entry: self.admission.queue.order(entry.request))
        return victim

    def _preempt(self, entry: Entry) -> None:
        self._settle()
        held = bool(self._rows.held[entry.request.row])
        self.admission.release(entry.request)
        entry.request.num_preemptions += 1
        self._stats.preemptions += 1
        self.admission.requeue(entry, parked=held)
        self._refresh_running()
        self.admission.reclaim_rows(self._step)

    def check(self) -> None:
        """Raise AssertionError unless rows, pages, seats and requests agree. For tests: it looks at everything."""
        self.rows.check(self.pool)
        self.admission.check()
        assert np.array_equal(np.sort(self._running), np.flatnonzero(self.rows.active)), "running rows and active rows differ"
