"""The steady path of steps with drafts: rows that all decode, k drafts each, for as long as nobody comes or goes.

As in `steady`, a step differs from the one before in little: the rows, their tenancies and how many tokens each may get stay the same. What
changes is how far each row has come, which is kept in arrays over the rows of the step and written into `HostRows` before somebody reads
it there. Records are laid aside whole, and what they say is written down many steps at a time.
"""

from __future__ import annotations

import numpy as np

from modelrunner.batch import Patch, Plan, Record
from modelrunner.page_pool import Int32Array
from modelrunner.rows import BlockTable, HostRows
from modelrunner.steady import MOST_KEPT
from modelrunner.step_books import Stats


class SteadyDrafts:
    """Repeats `first`, a plan of all running rows in which each decodes with drafts. Attributes as in `Steady`."""

    def __init__(self, table: HostRows, first: Plan, stats: Stats) -> None:
        """Right after `first` was planned."""
        self.rows = first.rows
        self._first, self._table, self._stats = first, table, stats
        self._step = first.step
        self._kept: list[Int32Array] = []  # records of each step committed and not yet settled
        self._query = first.num_query
        self._loaded = False
        self._planned = False  # since the last settling
        self.all = np.ones(self.rows.size, np.bool_)
        self._names = np.stack([self.rows, first.generations], 1)
        usual = np.minimum(table.drafts[self.rows], first.num_draft) + 1
        small = any(each.tokens_per_page < 1 + first.num_draft for each in table.tables)
        self._left = 0
        self._usable = np.array_equal(usual, first.num_query) and not small
        self.drafting = True
        for array in (first.rows, first.generations, first.num_query):
            array.setflags(write=False)  # the runner knows from the array that its contents are the same

    @property
    def left(self) -> int:
        """Steps that can still be planned like this; up to there no row's limit bounds its tokens."""
        if self._usable and not self._loaded:
            self._load()
        return self._left

    def _load(self) -> None:
        """Take over how far the rows have come."""
        table, rows, slots = self._table, self.rows, 1 + self._first.num_draft
        self._upper, self._lower = table.known_upper[rows], table.known_lower[rows]
        self._room = [each.used[rows] * each.tokens_per_page - each.ahead for each in table.tables]
        ahead = max([0, *(each.ahead for each in table.tables)])
        self._left = int((table.limit[rows] - self._upper).min() - ahead - 1) // slots
        self._loaded = True

    def due(self) -> list[tuple[BlockTable, Int32Array]]:
        """Rows that need one page more for the next step, by group; groups where there are none are left out. After a look at `left`."""
        tokens = self._upper + (self._query - 1)
        found = []
        for table, room in zip(self._table.tables, self._room, strict=True):
            lacking = tokens > room
            if lacking.any():
                found.append((table, self.rows[lacking]))
        return found

    def plan(self, step: int, patch: Patch) -> Plan:
        """The next plan, for which the rows that `due` named have got a page."""
        first = self._first
        if not patch.empty:
            self._room = [each.used[self.rows] * each.tokens_per_page - each.ahead for each in self._table.tables]
        self._upper += self._query
        self._lower += 1
        self._step = step
        self._planned = True
        self._left -= 1
        length = int(self._upper.max()) - 1
        pages = tuple([-(-length // table.tokens_per_page) for table in self._table.tables])
        return Plan(
            step, self.rows, first.generations, first.num_query, patch, first.num_decode, first.num_tokens, first.max_query, length, pages,
            first.features, first.num_draft, first.num_next, first.row_features,
        )  # fmt: skip

    def commit(self, plan: Plan, records: Int32Array) -> bool:
        """Take in the records of a step, [N, words] int32, if no row ends with it. False, and nothing is changed, if one does, or if the
        plan is not a repetition of the first."""
        if plan.rows is not self.rows or plan is self._first:
            return False
        counts = records[:, Record.NUM_TOKENS]
        if records[:, Record.FINISH].any() or not counts.all() or not (records[:, : Record.NUM_TOKENS] == self._names).all():
            return False
        if not self._loaded:
            self._load()
        self._upper -= self._query - counts
        self._lower += counts - 1
        self._kept.append(records)
        if len(self._kept) == MOST_KEPT:
            self._write_down()
        return True

    def computed(self) -> Int32Array:
        """Committed tokens of each row that are in the cache, [N]."""
        later = np.zeros_like(self.rows)
        for records in self._kept:
            later += records[:, Record.NUM_TOKENS]
        return self._table.computed[self.rows] + later

    def settle(self) -> None:
        """Write everything to the rows: from now on, until the next plan or commit, the table says how things are."""
        if not self._loaded:
            return
        table, rows = self._table, self.rows
        table.known_upper[rows], table.known_lower[rows] = self._upper, self._lower
        table.computed_upper[rows] = self._upper - 1
        if self._planned:
            table.last_ticket[rows] = self._step
            self._planned = False
        if self._kept:
            self._write_down()
        self._loaded = False

    def _write_down(self) -> None:
        """What the records laid aside say: tokens for the log, and drafts."""
        table, rows, k = self._table, self.rows, self._first.num_draft
        records = np.stack(self._kept, 1)  # [N, steps, words]
        self._kept.clear()
        counts, drafted = records[:, :, Record.NUM_TOKENS], records[:, :, Record.DRAFTED]
        tokens = records[:, :, Record.TOKENS : Record.TOKENS + 1 + k]
        counted = (np.arange(1 + k) < counts[:, :, None]).reshape(rows.size, -1)
        at, _ = np.nonzero(counted)
        place = np.cumsum(counted, 1)[counted] - 1
        table.token_log[rows[at], table.known[rows[at]] + place] = tokens.reshape(rows.size, -1)[counted]
        total = counts.sum(1)
        accepted = np.minimum(counts - 1, drafted)
        table.known[rows] += total
        table.computed[rows] += total
        table.num_drafted[rows] += drafted.sum(1)
        table.num_accepted[rows] += accepted.sum(1)
        self._stats.by_place(drafted.ravel(), accepted.ravel())
        table.policy.learn(drafted.ravel(), accepted.ravel())
