"""What the records of a step change in the scheduler's books: tokens, counters, the prefix cache, requests that end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from modelrunner.admission import Admission
from modelrunner.batch import Finish, Outcome, Plan, Record
from modelrunner.page_pool import Int32Array, PagePool
from modelrunner.request import Request
from modelrunner.rows import BoolArray, HostRows
from modelrunner.steady import Steady
from modelrunner.steady_drafts import SteadyDrafts
from modelrunner.step_books import Committed, Stats

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ERROR: "error"}


class Commits:
    """Takes records in, in step order. clock: monotonic seconds.

    Whoever calls `general` or `end` refreshes its list of running rows when requests have ended.
    """

    def __init__(self, rows: HostRows, pool: PagePool, admission: Admission, stats: Stats, clock: Callable[[], float]) -> None:
        self.rows, self.admission, self.stats = rows, admission, stats
        self._pool, self._clock = pool, clock

    def steady(self, outcome: Outcome, steady: Steady | SteadyDrafts) -> Committed:
        """What else follows from more tokens of each row, all of them with output before: no page of a prompt is left to index."""
        plan, records = outcome.plan, outcome.records
        if isinstance(steady, SteadyDrafts):
            tokens, counts = records[:, steady.tokens], records[:, Record.NUM_TOKENS]
            self.stats.computed_tokens += steady.num_computed  # it counts the rest itself, many steps at a time
        else:
            tokens, counts = records[:, Record.TOKENS : Record.TOKENS + 1], plan.num_query
            self.stats.computed_tokens += plan.num_tokens
            self.stats.generated_tokens += plan.num_tokens
        for table in self.rows.tables:
            if table.windowed:
                table.free_behind(plan.rows, steady.computed(), self._pool)
        return Committed(plan.rows, tokens, counts, [])

    def general(self, outcome: Outcome) -> Committed:
        """Any records, row by row."""
        plan, rows = outcome.plan, self.rows
        live = self.alive(plan)
        records, at, computing, num_decode = outcome.records, plan.rows, plan.num_query, plan.num_decode
        if not live.all():
            records, at, computing, num_decode = records[live], at[live], computing[live], int(live[:num_decode].sum())
        named = (records[:, Record.ROW] == at) & (records[:, Record.GENERATION] == plan.generations[live])
        assert named.all(), f"step {plan.step}: a record names another row or tenancy than the plan"
        finish, counts = records[:, Record.FINISH], records[:, Record.NUM_TOKENS]
        tokens = records[:, Record.TOKENS : Record.TOKENS + 1 + plan.num_draft]
        if (ended := finish != Finish.NONE).any():
            counts = np.where(finish == Finish.ERROR, 0, counts)
        new = counts > 0
        known = rows.known[at]
        self._note_first_tokens(at[new & (known == rows.num_prompt[at])])
        if plan.num_draft:
            self._note_drafts(at[:num_decode], computing[:num_decode], counts[:num_decode], records[:num_decode, Record.DRAFTED])
        rows.append(at, tokens, counts)
        rows.computed[at] = np.where(new, known + counts - 1, rows.computed[at] + computing)
        self.stats.computed_tokens += int(computing.sum())
        self.stats.generated_tokens += int(counts.sum())
        self.admission.index_prompts(at)
        if rows.num_media:
            self.admission.media.commit(at)
        for table in rows.tables:
            if table.windowed:
                table.free_behind(at, rows.computed[at], self._pool)
        finished = self._finish_rows(at[ended], finish[ended])
        if new.all():
            return Committed(at, tokens, counts, finished)
        return Committed(at[new], tokens[new], counts[new], finished)

    def alive(self, plan: Plan) -> BoolArray:
        """Which rows of a plan still belong to the tenancy that it names."""
        alive: BoolArray = self.rows.active[plan.rows] & (self.rows.generation[plan.rows] == plan.generations)
        return alive

    def end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """Write down why a request without a row has ended, and forget it."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        self.admission.forget(request)

    def _note_drafts(self, at: Int32Array, planned: Int32Array, counts: Int32Array, drafted: Int32Array) -> None:
        """Decode rows `at` were planned to get up to so many tokens, and got `counts` (none, if they end with an error)."""
        got = counts > 0
        self.rows.correct(at[got], planned[got], counts[got])
        accepted = self.stats.checked(drafted, counts)
        self.rows.num_drafted[at] += drafted
        self.rows.num_accepted[at] += accepted
        self.stats.by_place(drafted, accepted)
        self.rows.policy.learn(drafted, accepted)

    def _note_first_tokens(self, rows: Int32Array) -> None:
        now = self._clock() if rows.size else 0.0
        for row in rows.tolist():
            request = self._request_at(row)
            request.first_token_time = now
            self.admission.prompt_is_there(request)

    def _request_at(self, row: int) -> Request:
        entry = self.admission.holders[row]
        assert entry is not None, f"row {row} has no request"
        return entry.request

    def _finish_rows(self, rows: Int32Array, codes: Int32Array) -> list[Request]:
        """End the requests whose record carries a finish code."""
        finished = []
        for row, code in zip(rows.tolist(), codes.tolist(), strict=True):
            request = self._request_at(row)
            if code == Finish.ERROR:
                self.admission.distrust(row)
            self.admission.release(request)
            last = request.output_token_ids[-1] if code == Finish.STOP else None
            stop = last if last in request.params.stop_token_ids else None
            self.end(request, REASONS[Finish(code)], request.failure if code == Finish.ERROR else stop)
            finished.append(request)
        return finished
