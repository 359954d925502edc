"""The steady path of steps with drafts: rows that all decode, k drafts each, for as long as nobody comes or goes.

As in `steady`, a step differs from the one before in little: the rows, their tenancies and how many tokens each may get stay the same.
What changes is how far each row has come: one sum for a row, to which a commit adds. All else that is counted of a row follows from it and
from the number of steps in flight, and is written into `HostRows` before somebody reads it there. What records say is laid aside, and
written down many steps at a time (see `aside`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelrunner.aside import COUNTS, MOST_KEPT, most_kept
from modelrunner.batch import Finish, Patch, Plan, Record, record_words
from modelrunner.page_pool import Int32Array
from modelrunner.rows import BlockTable, HostRows
from modelrunner.steady import NAMES
from modelrunner.step_books import Stats

NAMED = b"\1", b"\1", b"\0", b"\1"  # which of a record's first words are those expected: row, tenancy, a count that is not 0, and no end


class SteadyDrafts:
    """Repeats `first`, a plan of all running rows in which each decodes with drafts. Attributes as in `Steady`.

    num_computed: query tokens of a step. tokens: where those of a row are in its record.
    """

    def __init__(self, table: HostRows, first: Plan, stats: Stats) -> None:
        """Right after `first` was planned."""
        self.rows = first.rows
        self._first, self._table, self._stats, self._aside = first, table, stats, table.aside
        self._step = first.step
        self._counted = 0, 0, 0  # what `stats` knows of the steps laid aside: how many of them, their tokens, their drafts
        self._query = first.num_query
        self.num_computed = int(first.num_query.sum())
        self.tokens = slice(int(Record.TOKENS), record_words(first.num_draft))
        self._loaded = False
        self._planned = False  # since the last settling
        self.all, self._every = np.ones(self.rows.size, np.bool_), np.arange(self.rows.size)
        zero = np.zeros_like(self.rows)
        self._expected = np.stack([self.rows, first.generations, zero, zero + Finish.NONE])
        self._as_expected = b"".join(each * self.rows.size for each in NAMED)
        usual = np.minimum(table.drafts[self.rows], first.num_draft) + 1
        slots = self._slots = 1 + first.num_draft
        small = table.max_model_len < slots or any(each.tokens_per_page < slots for each in table.tables)
        self._left = 0
        self._usable = np.array_equal(usual, first.num_query) and not small
        self.wavering = table.policy.varies
        self._aside.begin(self.rows, slots)
        self._most_kept = MOST_KEPT if self.wavering else most_kept(self.rows.size)  # what was kept lately decides what is drafted next
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
        `_ahead`: steps planned since, less those committed since. `_length`: tokens that a row has in the newest step, at most.
        `_room` [N] of each group: the number that `_come` may be and the row yet needs no page for the next step, if there are `_room_for`
        steps ahead. `_enough` [N] of each group: what that is for a row with pages up to its limit. `_free`: steps that can surely be
        planned before a row needs a page. `_due`: rows that get one with the next plan, by group, as places in [0, N).
        """
        table, rows = self._table, self.rows
        self._come = table.known_upper[rows]
        self._ahead = self._room_for = self._free = 0
        self._start, self._lower = self._come.copy(), table.known_lower[rows]
        self._uncomputed = self._come - table.computed[rows]
        self._length = int(self._come.max()) - 1
        more, limit = 1 - self._query, table.limit[rows]
        self._room = [each.used[rows] * each.tokens_per_page - each.ahead + more for each in table.tables]
        self._enough = [limit - 1 - each.ahead + more for each in table.tables]
        self._due: list[tuple[int, NDArray[np.intp]]] = []
        ahead = max([0, *(each.ahead for each in table.tables)])
        self._left = int((limit - self._come).min() - ahead - 1) // self._slots
        self._loaded = True

    def due(self, available: int) -> list[tuple[BlockTable, Int32Array]]:
        """Rows that get one page more for the next step, by group; groups where there are none are left out. After a look at `left`, and
        once for each plan. available: pages; with fewer than `HostRows.early` asks for, only those rows that need one for the next step.

        A plan takes a row at most `_slots` tokens on, and a commit takes it back or leaves it where it is. So the room that the row with
        least has now is enough for so many plans, whatever is committed between them.
        """
        if self._free > 0:
            self._free -= 1
            return []
        if self._ahead != self._room_for:
            more, self._room_for = (self._ahead - self._room_for) * self._query, self._ahead
            self._room, self._enough = [each - more for each in self._room], [each - more for each in self._enough]
        tables, least = self._table.tables, self._left * self._slots
        lacking: list[tuple[int, int, Int32Array]] = []
        for group, room in enumerate(self._room):
            if self._every.size == 1:  # as below, by numbers
                spare, at_least = self._come, room.item() - self._come.item()
            else:
                spare = room - self._come
                at_least = spare.item(spare.argmin())
            if at_least < 0:
                lacking.append((group, at_least, spare))
            elif at_least < least:
                least = at_least
        if lacking:
            least = min(least, self._choose(lacking, available))
        self._free = least // self._slots
        return [(tables[group], self.rows[at]) for group, at in self._due] if lacking else []

    def _choose(self, lacking: list[tuple[int, int, Int32Array]], available: int) -> int:
        """Which rows get pages of the groups in which some row lacks one (group, room of the row with least, [N] of each, which of one row
        is not looked at). Returns how much of it there is then at least."""
        tables, least = self._table.tables, []
        for group, at_least, spare in lacking:
            table = tables[group]
            at = self._every
            if at.size > 1:
                at = ((spare < table.early) & (self._room[group] < self._enough[group])).nonzero()[0]
            self._due.append((group, at))
            least.append(at_least + table.tokens_per_page if at.size == self.rows.size else table.early)
        if sum([at.size for _, at in self._due]) <= available:
            return min(least)
        if self._every.size > 1:
            self._due = [(group, (spare < 0).nonzero()[0]) for group, _, spare in lacking]
        return 0

    def plan(self, step: int, patch: Patch) -> Plan:
        """The next plan, for which the rows that `due` named have got a page."""
        first, tables = self._first, self._table.tables
        if self._due:
            for group, at in self._due:
                self._room[group][slice(None) if at.size == self.rows.size else at] += tables[group].tokens_per_page
            self._due.clear()
        self._ahead += 1
        self._step = step
        self._planned = True
        self._left -= 1
        length = self._length = self._length + self._slots
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
        if (self._expected == records[NAMES].T).tobytes() != self._as_expected:
            return False
        if not self._loaded:
            self._load()
        np.add(self._come, records[COUNTS], self._come)
        self._ahead -= 1
        aside = self._aside
        aside.add(records)
        if aside.steps == self._most_kept:
            self._write_down()
        return True

    def computed(self) -> Int32Array:
        """Committed tokens of each row that are in the cache, [N]."""
        return self._come - self._uncomputed

    def count(self) -> None:
        """Bring the sums of tokens and drafts in `stats` up to date."""
        steps, tokens, drafts = self._counted
        if self._aside.steps > steps:
            sums = self._aside.sums(steps)
            self._counted = self._aside.steps, tokens + sums[0], drafts + sums[1]
            self._add(self._aside.steps - steps, *sums)

    def _add(self, steps: int, tokens: int, drafts: int) -> None:
        """To `stats`."""
        self._stats.generated_tokens += tokens
        self._stats.num_drafted += drafts
        self._stats.num_accepted += tokens - steps * self.rows.size  # each row's tokens but one were drafts

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
        if self._aside.steps:
            self._write_down()
        self._loaded = False

    def _write_down(self) -> None:
        """Tokens laid aside to the log, and what the steps say of drafts."""
        table, rows, steps = self._table, self.rows, self._aside.steps
        total, counts, drafted = self._aside.empty(table.known[rows])
        checked = drafted.sum(0)
        table.known[rows] += total
        table.computed[rows] += total
        table.num_drafted[rows] += checked
        table.num_accepted[rows] += total - steps
        self._length = int((self._come + self._ahead * self._query).max()) - 1
        before, tokens, drafts = self._counted
        self._add(steps - before, int(total.sum()) - tokens, int(checked.sum()) - drafts)
        self._counted = 0, 0, 0
        accepted = counts - 1
        self._stats.by_place(drafted, accepted)
        table.policy.learn(drafted, accepted)
