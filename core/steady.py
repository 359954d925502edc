"""The steady path: rows that all decode, for as long as nobody comes or goes.

The idea: such a step differs from the one before in little but a number. So a `Steady` keeps what stays the same, counts planned and
committed steps in two integers, lays committed tokens aside, and writes all that into `HostRows` only before somebody reads it there
(`settle`). Which rows need a page at which step is known from the start, since a row fills a page in `tokens_per_page` steps.
"""

from __future__ import annotations

import numpy as np

from modelrunner.aside import most_kept, runs
from modelrunner.batch import Finish, Patch, Plan, Record
from modelrunner.page_pool import Int32Array
from modelrunner.rows import BlockTable, HostRows

NAMES = slice(None), slice(0, int(Record.DRAFTED))  # of all records the words that tell that all is as ever
TOKEN = slice(None), int(Record.TOKENS)


class Steady:
    """Repeats `first`, a plan of all running rows in which each decodes. Ends when a row leaves, one comes, or `left` is 0.

    rows: [N] int32, the very array of each of its plans, which tells them from others (so do generations and query counts).
    all: [N] bool, True. left: steps that can still be planned before a row reaches its limit. wavering: the next step may be one of another
    number of drafts, though its rows are the same.
    """

    def __init__(self, table: HostRows, first: Plan) -> None:
        """Right after `first` was planned."""
        self.rows = first.rows
        self.left = int((table.limit[self.rows] - table.known_upper[self.rows]).min())
        self.wavering = bool(table.policy.varies and table.drafts[self.rows].any())
        self._first = first
        self._table = table
        self._length = first.max_seq_len
        self._step = first.step  # newest planned
        self._planned = 0  # steps planned and not yet settled
        self._tokens: list[Int32Array] = []  # [N] of each step committed and not yet settled
        self._calendars = [calendar(each, self.rows, table.computed_upper[self.rows]) for each in table.tables]
        if any(max(days) >= each.tokens_per_page for each, days in zip(table.tables, self._calendars, strict=True)):
            self.left = 0  # drafts that were not kept left whole pages to spare: those are filled first
        self.all = np.ones(self.rows.size, np.bool_)
        zero = np.zeros_like(self.rows)
        self._expected = np.stack([self.rows, first.generations, zero + 1, zero + Finish.NONE])
        self._as_expected = b"\1" * self._expected.size
        self._most_kept = most_kept(self.rows.size)
        for array in (first.rows, first.generations, first.num_query):
            array.setflags(write=False)  # the runner knows from the array that its contents are the same

    def due(self, available: int) -> list[tuple[BlockTable, Int32Array]]:
        """Rows that need one page more for the next step, by group; groups where there are none are left out. available: pages."""
        turn = self._step - self._first.step
        pairs = zip(self._table.tables, self._calendars, strict=True)
        return [(table, rows) for table, days in pairs if (rows := days.get(turn % table.tokens_per_page)) is not None]

    def plan(self, step: int, patch: Patch) -> Plan:
        """The next plan."""
        first = self._first
        self._length += 1
        self._step = step
        self._planned += 1
        self.left -= 1
        pages = tuple([-(-self._length // table.tokens_per_page) for table in self._table.tables])
        return Plan(
            step, self.rows, first.generations, first.num_query, patch,
            first.num_decode, first.num_tokens, 1, self._length, pages, first.features, row_features=first.row_features,
        )  # fmt: skip

    def commit(self, plan: Plan, records: Int32Array) -> bool:
        """Take in the records of a step, [N, words] int32, if all is as ever: each row has one more token and none ends.

        False, and nothing is changed, if it is not, or if the plan is not a repetition of the first.
        """
        if plan.rows is not self.rows or plan is self._first:
            return False
        if (self._expected == records[NAMES].T).tobytes() != self._as_expected:
            return False
        self._tokens.append(records[TOKEN])
        if len(self._tokens) == self._most_kept:
            self._settle_tokens()
        return True

    def computed(self) -> Int32Array:
        """Committed tokens of each row that are in the cache, [N]."""
        return self._table.computed[self.rows] + np.int32(len(self._tokens))

    def count(self) -> None:
        """The sums in the scheduler's `stats` are up to date already: each step has as many tokens as rows."""

    def settle(self) -> None:
        """Write everything to the rows: from now on, until the next plan or commit, the table says how things are."""
        if self._planned:
            table, rows = self._table, self.rows
            table.computed_upper[rows] += self._planned
            table.known_upper[rows] += self._planned
            table.known_lower[rows] += self._planned
            table.last_ticket[rows] = self._step
            self._planned = 0
        if self._tokens:
            self._settle_tokens()

    def _settle_tokens(self) -> None:
        table, rows, count = self._table, self.rows, len(self._tokens)
        tokens = np.ascontiguousarray(np.concatenate(self._tokens).reshape(count, -1).T)
        self._tokens.clear()
        items = runs(table.token_log, count)
        items[rows.astype(np.int64) * table.max_model_len + table.known[rows]] = tokens.view(items.dtype).ravel()
        table.known[rows] += count
        table.computed[rows] += count


def calendar(table: BlockTable, rows: Int32Array, tokens: Int32Array) -> dict[int, Int32Array]:
    """Which of `rows`, which hold pages for `tokens`, need a page after how many steps of one token, modulo those that fill a page."""
    spare = table.used[rows] * table.tokens_per_page - tokens
    order = np.argsort(spare, kind="stable")
    days, starts = np.unique(spare[order], return_index=True)
    return dict(zip(days.tolist(), np.split(rows[order], starts[1:]), strict=True))
