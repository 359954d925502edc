"""Repeated steps with drafts give each row its pages in time, and write down all its tokens: against a rule that looks at everything."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import FULL, SHAPE

from modelrunner import aside
from modelrunner.batch import EMPTY_PATCH, Plan, record_words
from modelrunner.draft_policy import DraftPolicy
from modelrunner.model_state import FullAttention
from modelrunner.page_pool import GroupLayout, PagePool
from modelrunner.rows import HostRows
from modelrunner.steady_drafts import SteadyDrafts
from modelrunner.step_books import Stats

OWN = FullAttention("own", **SHAPE)  # a drafter's: it needs pages for its passes, too
PAGES = 10_000


class Rows:
    """Rows that decode with drafts, as `SteadyDrafts` sees them, and as plain numbers."""

    def __init__(
        self, lengths: list[int], limits: list[int], drafts: list[int], most: int, depth: int, sizes: list[int], max_model_len: int
    ) -> None:
        layouts = [GroupLayout(group, size) for group, size in zip((FULL, OWN), sizes, strict=False)]
        policy = DraftPolicy(most, depth=depth, groups=("own",))
        self.table, self.pool = HostRows(layouts, len(lengths) + 1, max_model_len, policy), PagePool(PAGES + 1)
        self.rows = np.arange(len(lengths), 0, -1).astype(np.int32) - 1
        self.limits, self.slots, self.depth = np.array(limits), 1 + most, depth
        self.log = [list(range(length)) for length in lengths]
        for row, length, limit, wanted in zip(self.rows.tolist(), lengths, limits, drafts, strict=True):
            self.table.open(row, np.arange(length, dtype=np.int32), length - 1, 1, limit, 0, drafts=wanted)
        self.query = counts = np.array(drafts, np.int32) + 1
        for each in self.table.tables:
            each.grow(self.rows, each.lacks(self.rows, self.table.computed_upper[self.rows] + counts, self.limits), self.pool)
        self.table.advance(self.rows, counts)
        self.in_flight = deque([self.plan_of(0, counts)])
        self.stats = Stats(drafted_at=[0] * most, accepted_at=[0] * most)
        self.steady = SteadyDrafts(self.table, self.in_flight[0], self.stats)
        self.counted = np.zeros(2, np.int64)
        self.commit(np.ones_like(counts), counts - 1)  # the first one, as the general path does it

    def plan_of(self, step: int, counts: Any) -> Plan:
        most, num, generations = self.slots - 1, self.rows.size, self.table.generation[self.rows]
        sizes = num, num * self.slots, self.slots, 1, (1,)
        return Plan(step, self.rows, generations, counts, EMPTY_PATCH, *sizes, num_draft=most, num_next=most)

    @property
    def upper(self) -> Any:
        """Tokens that each row has at most, newest one included, after the steps planned so far."""
        return np.array([len(log) for log in self.log]) + self.query * len(self.in_flight)

    def wanted(self, available: int) -> list[set[int]]:
        """Places of the rows that get a page for the next step, by group, by the rule of `HostRows.early`."""
        strict, early = [], []
        for each in self.table.tables:
            used = each.used[self.rows] * each.tokens_per_page
            needed = self.upper + self.query - 1 + each.ahead
            lack = np.minimum(needed, self.limits - 1) > used
            later = np.minimum(needed + each.early, self.limits - 1) > used
            strict.append(set(np.flatnonzero(lack).tolist()))
            early.append(set(np.flatnonzero(later).tolist()) if lack.any() else set())
        return early if sum(map(len, early)) <= available else strict

    def plan(self, available: int) -> bool:
        """Plan a step with so many pages left, if that can be done as before."""
        if self.steady.left <= 0:
            return False
        want = self.wanted(available)
        if sum(map(len, want)) > available:
            return False
        got = [set[int]() for _ in self.table.tables]
        for each, rows in self.steady.due(available):
            got[each.index] = {self.rows.tolist().index(row) for row in rows.tolist()}
            each.grow_one(rows, self.pool)
        assert got == want
        self.in_flight.append(self.steady.plan(self.in_flight[-1].step + 1 if self.in_flight else 1, EMPTY_PATCH))
        for each in self.table.tables:
            assert (each.used[self.rows] * each.tokens_per_page >= np.minimum(self.upper - 1 + each.ahead, self.limits - 1)).all()
        longest = self.in_flight[-1].max_seq_len
        assert self.upper.max() - 1 <= longest <= self.table.max_model_len
        return True

    def commit(self, counts: Any, drafted: Any) -> None:
        plan = self.in_flight.popleft()
        records = np.zeros((self.rows.size, record_words(self.slots - 1)), np.int32)
        records[:, 0], records[:, 1], records[:, 2], records[:, 4] = self.rows, plan.generations, counts, drafted
        records[:, 5:] = np.random.default_rng(plan.step).integers(0, 1000, (self.rows.size, self.slots))
        self.counted += counts.sum(), drafted.sum()
        for log, record, count in zip(self.log, records.tolist(), counts.tolist(), strict=True):
            log += record[5 : 5 + count]
        if plan.step:
            assert self.steady.commit(plan, records)
        else:
            self.table.correct(self.rows, plan.num_query, counts)
            self.table.append(self.rows, records[:, 5:], counts)
            self.table.computed[self.rows] = self.table.known[self.rows] - 1

    def check(self) -> None:
        self.steady.count()
        stats, first = self.stats, self.rows.size  # tokens of the step that the general path would have counted
        assert [stats.generated_tokens, stats.num_drafted] == [self.counted[0] - first, self.counted[1] - (self.query - 1).sum()]
        self.steady.settle()
        assert [stats.generated_tokens, sum(stats.drafted_at)] == [self.counted[0] - first, stats.num_drafted]
        assert stats.num_accepted == sum(stats.accepted_at)
        table = self.table
        for place, row in enumerate(self.rows.tolist()):
            assert table.token_log[row, : table.known[row]].tolist() == self.log[place]
        assert table.known_upper[self.rows].tolist() == self.upper.tolist()
        assert table.computed_upper[self.rows].tolist() == (self.upper - 1).tolist()
        assert table.computed[self.rows].tolist() == [len(log) - 1 for log in self.log]
        table.check(self.pool)


@st.composite
def starts(draw: st.DrawFn) -> Rows:
    most, depth, num_groups = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sizes = draw(st.lists(st.sampled_from([most + 1, 8, 11, 16, 64]).filter(lambda size: size > most), min_size=num_groups, max_size=2))
    lengths = draw(st.lists(st.integers(2, 70), min_size=1, max_size=7))
    limits = [length + draw(st.integers(8 * most, 200)) for length in lengths]
    drafts = [draw(st.integers(0, most)) if draw(st.booleans()) else most for _ in lengths]  # a request may ask for fewer
    return Rows(lengths, limits, drafts, most, depth, sizes, max(limits) + draw(st.integers(0, 30)))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(starts(), st.integers(0, 1 << 30), st.booleans(), st.sampled_from([3, 32]))
def test_each_row_has_its_pages_in_time(world: Rows, seed: int, staged: bool, most_kept: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "FEW_ROWS", 0 if staged else 128)
        world.steady._aside.begin(world.rows, world.slots)
        world.steady._most_kept = most_kept
        draws = Random(seed)
        while True:
            scarce = draws.random() < 0.1
            while len(world.in_flight) < world.depth:
                if not world.plan(draws.randrange(world.rows.size + 1) if scarce else PAGES):
                    return world.check()
            if draws.random() < 0.1:  # somebody looks while all is in flight
                world.check()
            for _ in range(draws.randint(1, len(world.in_flight))):
                drafted = np.array([draws.randint(0, most) for most in (world.query - 1).tolist()])
                eager = draws.random()
                kept = [1 + (int(most) if draws.random() < eager else draws.randint(0, int(most))) for most in drafted]
                world.commit(np.array(kept), drafted)
            if draws.random() < 0.1:
                world.check()


def test_few_checks_are_made() -> None:
    """Otherwise the test above would show little: rows between borders are not looked at."""
    world = Rows([20, 23], [900, 900], [3, 3], 3, 2, [16], 1000)
    checks = steps = 0
    while world.plan(PAGES):
        steps += 1
        checks += world.steady._free == 0
        if len(world.in_flight) == world.depth:
            world.commit(np.array([2, 3]), np.array([3, 3]))
    assert steps > 200
    assert checks < steps / 2
