"""The steady path of steps with drafts: rows that all decode, k drafts each, for as long as nobody comes or goes.

As in `steady`, a step differs from the one before in little: the rows, their tenancies and how many tokens each may get stay the same.
What changes is how far each row has come: one sum for a row, to which a commit adds. All else that is counted of a row follows from it and
from the number of steps in flight, and is written into `HostRows` before somebody reads it there. Records are laid aside whole, and what
they say is written down many steps at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from modelrunner.batch import Finish, Patch, Plan, Record, record_words
from modelrunner.page_pool import Int32Array
from modelrunner.rows import BlockTable, HostRows
from modelrunner.steady import MOST_KEPT
from modelrunner.step_books import Stats

NAMED = b"\1\1\0\1"  # which of a record's first words are those that are expected: row, tenancy, a count that is not 0, and no end


class SteadyDrafts:
    """Repeats `first`, a plan of all running rows in which each decodes with drafts. Attributes as in `Steady`.

    num_computed: query tokens of a step. tokens: where those of a row are in its record.
    """

    def __init__(self, table: HostRows, first: Plan, stats: Stats) -> None:
        """Right after `first` was planned."""
        self.rows = first.rows
        self._first, self._table, self._stats = first, table, stats
        self._step = first.step
        self._kept: list[Int32Array] = []  # records of each step committed and not yet settled
        self._query = first.num_query
        self.num_computed = int(first.num_query.sum())
        self.tokens = slice(int(Record.TOKENS), record_words(first.num_draft))
        self._steps: dict[int, Int32Array] = {}  # query tokens of each row in so many steps
        self._loaded = False
        self._planned = False  # since the last settling
        self.all = np.ones(self.rows.size, np.bool_)
        zero = np.zeros_like(self.rows)
        self._expected = np.stack([self.rows, first.generations, zero, zero + Finish.NONE], 1)
        self._as_expected = NAMED * self.rows.size
        usual = np.minimum(table.drafts[self.rows], first.num_draft) + 1
        slots = 1 + first.num_draft
        small = table.max_model_len < slots or any(each.tokens_per_page < slots for each in table.tables)
        self._left = 0
        self._usable = np.array_equal(usual, first.num_query) and not small
        if self._usable:
            self._runs = sliding_window_view(table.token_log, slots, 1, writeable=True)
        self.wavering = table.policy.varies
        for array in (first.rows, first.generations, first.num_query):
            array.setflags(write=False)  # the runner knows from the array that its contents are the same

    @property
    def left(self) -> int:
        """Steps that can still be planned like this; up to there no row's limit bounds its tokens."""
        if self._usable and not self._loaded:
            self._load()
        return self._left

    def _load(self) -> None:
        """Take over how far the rows have come.

        `_come` [N]: tokens that a row knows at most after the steps that were planned by now, each corrected when it is committed.
        `_ahead`: steps planned since, less those committed since. `_reach` [N] of each group: the same number of tokens, of the next step,
        up to which a row has pages.
        """
        table, rows, slots = self._table, self.rows, 1 + self._first.num_draft
        self._come, self._ahead = table.known_upper[rows], 0
        self._start, self._lower = self._come.copy(), table.known_lower[rows]
        self._computed = table.computed[rows] - self._come
        self._reach = [each.used[rows] * each.tokens_per_page - each.ahead + 1 for each in table.tables]
        self._due: list[tuple[int, NDArray[np.intp]]] = []
        ahead = max([0, *(each.ahead for each in table.tables)])
        self._left = int((table.limit[rows] - self._come).min() - ahead - 1) // slots
        self._loaded = True

    def due(self) -> list[tuple[BlockTable, Int32Array]]:
        """Rows that need one page more for the next step, by group; groups where there are none are left out. After a look at `left`."""
        steps = self._ahead + 1
        if steps not in self._steps:
            self._steps[steps] = steps * self._query
        self._next = self._come + self._steps[steps]
        found = []
        self._due.clear()
        for group, reach in enumerate(self._reach):
            at = (self._next > reach).nonzero()[0]
            if at.size:
                self._due.append((group, at))
                found.append((self._table.tables[group], self.rows[at]))
        return found

    def plan(self, step: int, patch: Patch) -> Plan:
        """The next plan, for which the rows that `due` named have got a page."""
        first, tables = self._first, self._table.tables
        for group, at in self._due:
            self._reach[group][at] += tables[group].tokens_per_page
        self._ahead += 1
        self._step = step
        self._planned = True
        self._left -= 1
        length = int(np.maximum.reduce(self._next)) - 1
        pages = tuple([-(-length // table.tokens_per_page) for table in tables])
        return Plan(
            step, self.rows, first.generations, first.num_query, patch, first.num_decode, first.num_tokens, first.max_query, length, pages,
            first.features, first.num_draft, first.num_next, first.row_features,
        )  # fmt: skip

    def commit(self, plan: Plan, records: Int32Array) -> bool:
        """Take in the records of a step, [N, words] int32, if no row ends with it. False, and nothing is changed, if one does, or if the
        plan is not a repetition of the first."""
        if plan.rows is not self.rows or plan is self._first:
            return False
        if (records[:, : Record.DRAFTED] == self._expected).tobytes() != self._as_expected:
            return False
        if not self._loaded:
            self._load()
        self._come += records[:, Record.NUM_TOKENS]
        self._ahead -= 1
        self._kept.append(records)
        if len(self._kept) == MOST_KEPT:
            self._write_down()
        return True

    def computed(self) -> Int32Array:
        """Committed tokens of each row that are in the cache, [N]."""
        return self._computed + self._come

    def settle(self) -> None:
        """Write everything to the rows: from now on, until the next plan or commit, the table says how things are."""
        if not self._loaded:
            return
        table, rows = self._table, self.rows
        upper = self._come + self._ahead * self._query
        table.known_upper[rows], table.computed_upper[rows] = upper, upper - 1
        table.known_lower[rows] = self._lower + (self._come - self._start) + self._ahead
        if self._planned:
            table.last_ticket[rows] = self._step
            self._planned = False
        if self._kept:
            self._write_down()
        self._loaded = False

    def _write_down(self) -> None:
        """What the records laid aside say: tokens for the log, and drafts."""
        table, rows, slots = self._table, self.rows, 1 + self._first.num_draft
        records = np.concatenate(self._kept).reshape(len(self._kept), rows.size, -1)
        self._kept.clear()
        counts, drafted = records[:, :, Record.NUM_TOKENS], records[:, :, Record.DRAFTED]
        ends = np.cumsum(counts, 0, dtype=np.int32)
        # Each step's tokens go to the log with what follows those that count: the next step's lie over that. The last step's are cut.
        at, tokens = table.known[rows] + (ends - counts), records[:, :, self.tokens]
        np.copyto(tokens[-1], self._runs[rows, at[-1]], where=np.arange(slots) >= counts[-1][:, None])
        self._runs[np.tile(rows, len(records)), at.ravel()] = tokens.reshape(-1, slots)
        total, accepted = ends[-1], np.minimum(counts - 1, drafted)
        table.known[rows] += total
        table.computed[rows] += total
        table.num_drafted[rows] += drafted.sum(0)
        table.num_accepted[rows] += accepted.sum(0)
        self._stats.by_place(drafted.ravel(), accepted.ravel())
        table.policy.learn(drafted.ravel(), accepted.ravel())
