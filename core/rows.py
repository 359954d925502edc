"""The host's side of the request table: per-row counters, the token log and the block tables, as numpy arrays.

Per row there are two views of the same request. `committed` counts (known, computed) are what collected records proved. `upper` counts add
everything planned since. Pages are allocated by upper counts; they are freed, hashed and handed to the prefix cache by committed ones.

A step with drafts gives a row 1 to 1 + k tokens, and the host learns how many when it collects it. Upper counts then mean the most that
there can be, and are corrected at the commit; `known_lower` counts one token for each such step: a row that surely reaches its limit is
not planned again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from modelrunner.aside import Aside
from modelrunner.draft_policy import NO_DRAFTS, DraftPolicy
from modelrunner.page_pool import GroupLayout, Int32Array, PagePool
from modelrunner.prefix_cache import Hit
from modelrunner.token_budget import TokenBudget

BoolArray = npt.NDArray[np.bool_]
NO_LIMIT = np.iinfo(np.int32).max


class Selection(NamedTuple):
    """Rows of a step, the query tokens that each has at most, how many of the rows (the first ones) decode, and drafts of a row."""

    rows: Int32Array
    counts: Int32Array
    num_decode: int
    num_draft: int


@dataclass(frozen=True)
class Growth:
    """Pages given to rows of one group: `table[rows[i], cols[i]] = pages[i]`."""

    group: int
    rows: Int32Array
    cols: Int32Array
    pages: Int32Array


class BlockTable:
    """Pages of every row for one cache group.

    pages [max_rows, max_pages] int32: 0 where there is none. Counts of entries from the row's start, [max_rows] int32 each: used: in use,
    null ones included. first: null, because behind the window. indexed: offered to the prefix cache. hashed: to be offered once computed.
    """

    def __init__(self, layout: GroupLayout, index: int, max_rows: int, max_model_len: int, policy: DraftPolicy = NO_DRAFTS) -> None:
        """ahead: tokens beyond those of a step that the row needs pages for: a drafter's passes. early: tokens before which a row of a step
        with drafts gets a page, if another one needs one (see `HostRows.early`)."""
        self.layout = layout
        self.index = index
        self.ahead = policy.ahead(layout.name)
        self.early = policy.early(layout.tokens_per_page, self.ahead)
        self.tokens_per_page = layout.tokens_per_page
        self.max_pages = max(layout.pages_for(max_model_len), 1)
        self.pages = np.zeros((max_rows, self.max_pages), np.int32)
        self.used = np.zeros(max_rows, np.int32)
        self.first = np.zeros(max_rows, np.int32)
        self.indexed = np.zeros(max_rows, np.int32)
        self.hashed = np.zeros(max_rows, np.int32)
        self.windowed = bool(layout.group.needed_from(np.array([max_model_len + 1], np.int64))[0] > 0)

    def deficit(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Pages that each row lacks to hold `tokens` tokens."""
        lacking: Int32Array = np.maximum(-(-tokens // self.tokens_per_page) - self.used[rows], 0)
        return lacking

    def lacks(self, rows: Int32Array, tokens: Int32Array, limit: Int32Array) -> Int32Array:
        """The same for rows that end at `limit` tokens, the last of which is never computed, and with the tokens ahead."""
        return self.deficit(rows, np.minimum(tokens + self.ahead, limit - 1) if self.ahead else np.minimum(tokens, limit - 1))

    def grow(self, rows: Int32Array, deficit: Int32Array, pool: PagePool) -> Growth:
        """Give each row the pages that it lacks."""
        lacks = deficit > 0
        rows, deficit = rows[lacks], deficit[lacks]
        total = int(deficit.sum())
        each = np.repeat(rows, deficit)
        start = np.cumsum(deficit) - deficit
        cols = (np.arange(total) + np.repeat(self.used[rows] - start, deficit)).astype(np.int32)
        pages = pool.alloc(total)
        self.pages[each, cols] = pages
        self.used[rows] += deficit
        return Growth(self.index, each, cols, pages)

    def start(self, row: int, tokens: int, limit: int, pool: PagePool) -> None:
        """`grow` by what `lacks` for one row."""
        used = int(self.used[row])
        lacking = -(-min(tokens + self.ahead, limit - 1) // self.tokens_per_page) - used
        if lacking > 0:
            self.pages[row, used : used + lacking] = pool.alloc(lacking)
            self.used[row] = used + lacking

    def grow_one(self, rows: Int32Array, pool: PagePool) -> Growth:
        """Give each row one page more."""
        pages = pool.alloc(rows.size)
        if rows.size == 1:  # as below, without arrays of indices
            row = rows.item()
            col = self.used.item(row)
            self.pages[row, col], self.used[row] = pages.item(), col + 1
            return Growth(self.index, rows, np.array([col], np.int32), pages)
        cols = self.used[rows]
        self.pages[rows, cols] = pages
        self.used[rows] = cols + 1
        return Growth(self.index, rows, cols, pages)

    def shrink(self, growth: Growth, keep: BoolArray, pool: PagePool) -> None:
        """Take pages back that `grow` gave, where `keep` is False."""
        rows, cols = growth.rows[~keep], growth.cols[~keep]
        pool.release(self.pages[rows, cols])
        self.pages[rows, cols] = 0
        np.subtract.at(self.used, rows, 1)

    def take_hit(self, row: int, hit: Hit) -> None:
        """Put the pages of a prefix hit, which the caller retained, at the start of an empty row."""
        first, pages = hit.first[self.index], hit.pages[self.index]
        self.pages[row, first : first + pages.size] = pages
        self.used[row] = self.indexed[row] = first + pages.size
        self.first[row] = first

    def free_behind(self, rows: Int32Array, computed: Int32Array, pool: PagePool) -> None:
        """Release the pages that no token from `computed` on can read. rows are distinct."""
        needed = self.layout.group.needed_from(computed.astype(np.int64)) // self.tokens_per_page
        gone = np.minimum(needed, self.used[rows]).astype(np.int32) - self.first[rows]
        passed = gone > 0
        rows, gone = rows[passed], gone[passed]
        if not rows.size:
            return
        each = np.repeat(rows, gone)
        start = np.cumsum(gone) - gone
        cols = np.arange(int(gone.sum())) + np.repeat(self.first[rows] - start, gone)
        pool.release(self.pages[each, cols])
        self.pages[each, cols] = 0
        self.first[rows] += gone

    def clear(self, row: int, pool: PagePool) -> None:
        """Release all pages of a row, the last ones to be reused first."""
        used = int(self.used[row])
        pool.release(self.pages[row, :used][::-1])
        self.pages[row, :used] = 0
        self.used[row] = self.first[row] = self.indexed[row] = self.hashed[row] = 0


class HostRows:
    """Counters of every row, [max_rows] each (tokens, int32, unless said otherwise).

    active [bool]: a request holds the row. generation: number of its tenancy. num_prompt: prompt tokens. limit: known tokens at which it
    ends. known, computed: committed. known_upper, computed_upper: committed and planned, at most, as if there were no limit. known_lower:
    the same at least. drafts: most that a step may check for the row. num_drafted, num_accepted: drafts checked and kept in this tenancy.
    last_ticket [int64]: last step that names the row.
    guided [bool]: each of its tokens needs a mask that depends on the one before. held [bool]: that mask is not there yet.
    computable: tokens up to the first item of media that is not encoded.
    token_log [max_rows, max_model_len]: prompt and committed output, `known` tokens; what lies behind is undefined. aside: tokens on their
    way there. features [int64]: bits of `batch.Feature`.
    """

    def __init__(self, layouts: Sequence[GroupLayout], max_rows: int, max_model_len: int, policy: DraftPolicy = NO_DRAFTS) -> None:
        self.max_model_len = max_model_len
        self.policy = policy
        self.active = np.zeros(max_rows, np.bool_)
        self.generation = np.zeros(max_rows, np.int32)
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.known = np.zeros(max_rows, np.int32)
        self.computed = np.zeros(max_rows, np.int32)
        self.known_upper = np.zeros(max_rows, np.int32)
        self.computed_upper = np.zeros(max_rows, np.int32)
        self.known_lower = np.zeros(max_rows, np.int32)
        self.drafts = np.zeros(max_rows, np.int32)
        self.num_drafted = np.zeros(max_rows, np.int32)
        self.num_accepted = np.zeros(max_rows, np.int32)
        self.features = np.zeros(max_rows, np.int64)
        self.guided = np.zeros(max_rows, np.bool_)
        self.held = np.zeros(max_rows, np.bool_)
        self.num_guided = 0  # active rows that are
        self.computable = np.full(max_rows, NO_LIMIT, np.int32)
        self.num_media = 0  # active rows with media that they have not computed yet
        self.last_ticket = np.full(max_rows, -1, np.int64)
        self.token_log = np.zeros((max_rows, max_model_len), np.int32)
        self.aside = Aside(self.token_log, 1 + policy.most)
        self.tables = [BlockTable(layout, index, max_rows, max_model_len, policy) for index, layout in enumerate(layouts)]

    def open(
        self, row: int, tokens: Int32Array, computed: int, num_prompt: int, limit: int, features: int, guided: bool = False, drafts: int = 0
    ) -> None:
        """Start a tenancy: `tokens` are known, the first `computed` of them are in the cache."""
        self.generation[row] += 1
        self.active[row] = True
        self.token_log[row, : tokens.size] = tokens
        self.known[row] = self.known_upper[row] = self.known_lower[row] = tokens.size
        self.drafts[row], self.num_drafted[row], self.num_accepted[row] = drafts, 0, 0
        self.computed[row] = self.computed_upper[row] = computed
        self.num_prompt[row], self.limit[row], self.features[row] = num_prompt, limit, features
        self.guided[row], self.held[row] = guided, False
        self.num_guided += guided

    def close(self, row: int, pool: PagePool) -> None:
        """End a tenancy and release its pages."""
        self.active[row] = False
        self.num_guided -= int(self.guided[row])
        self.guided[row] = self.held[row] = False
        for table in self.tables:
            table.clear(row, pool)

    def output(self, row: int) -> Int32Array:
        """Committed output tokens of a row: a view of the log."""
        view: Int32Array = self.token_log[row, self.num_prompt[row] : self.known[row]]
        return view

    def select(self, running: Int32Array, budget: TokenBudget, waiting: int, step: int = 0) -> Selection:
        """Rows of the next step.

        Rows with one token left to compute come first; what they leave of the budget goes to unfinished prompts, in the order of `running`.
        A row that will have reached its limit once the steps in flight are collected is left out, and one that is held. Rows go no further
        than to media that are not encoded. waiting: requests without a row. step: its number.
        """
        if self.num_guided:
            running = running[~self.held[running]]
        running = running[self.known_lower[running] < self.limit[running]]
        pending = self.known_upper[running] - self.computed_upper[running]
        last = pending == 1
        if self.num_media:
            pending = np.minimum(pending, self.computable[running] - self.computed_upper[running])
        decode = running[last & (pending == 1)]
        if decode.size > budget.most:  # those that waited longest
            decode = decode[np.argsort(self.last_ticket[decode], kind="stable")[: budget.most]]
        wanted = self.drafts[decode]
        num_draft = self.policy.drafts_in(decode.size, budget.most, step) if wanted.any() else 0  # few kinds of steps: few graphs
        query = np.ones(decode.size, np.int32)
        if num_draft:
            useful = self.limit[decode] - 1 - self.known_lower[decode]
            query += np.minimum(np.minimum(wanted, num_draft), useful)
        many = ~last & (pending > 0)
        prefill, pending = running[many], pending[many]
        tokens = budget.tokens(decode.size, prefill.size + waiting, int(self.computed_upper[decode].sum()), 1 + num_draft)
        left = max(tokens - decode.size * (1 + num_draft), 0)
        chunk = np.clip(left - (np.cumsum(pending) - pending), 0, pending).astype(np.int32)
        counts = np.concatenate([query, chunk[chunk > 0]])
        return Selection(np.concatenate([decode, prefill[chunk > 0]]), counts, int(decode.size), num_draft)

    def advance(self, rows: Int32Array, counts: Int32Array) -> BoolArray:
        """Move the upper counters by a step of at most `counts` query tokens. Returns which rows reach their last known token and so
        sample."""
        self.computed_upper[rows] += counts
        sampled: BoolArray = self.computed_upper[rows] >= self.known_upper[rows]
        self.known_upper[rows] = np.where(sampled, self.computed_upper[rows] + 1, self.known_upper[rows])
        self.known_lower[rows] += sampled
        if self.num_guided:
            self.held[rows] = self.guided[rows] & sampled
        return sampled

    def advance_one(self, row: int, count: int) -> bool:
        """`advance` of one row that does not decode."""
        upper = int(self.computed_upper[row]) + count
        self.computed_upper[row] = upper
        sampled = upper >= self.known_upper[row]
        if sampled:
            self.known_upper[row] = upper + 1
            self.known_lower[row] += 1
        if self.num_guided:
            self.held[row] = bool(self.guided[row]) and sampled
        return bool(sampled)

    def retreat(self, rows: Int32Array, counts: Int32Array, num_decode: int, sampled: BoolArray) -> None:
        """Undo `advance`. The first num_decode rows decode."""
        self.computed_upper[rows] -= counts
        self.known_upper[rows] -= np.where(np.arange(rows.size) < num_decode, counts, sampled)
        self.known_lower[rows] -= sampled
        self.held[rows] &= ~sampled

    def correct(self, rows: Int32Array, planned: Int32Array, got: Int32Array) -> None:
        """Decode rows were planned to get up to `planned` tokens in a step, and got `got`, at least one each."""
        self.known_upper[rows] -= planned - got
        self.computed_upper[rows] -= planned - got
        self.known_lower[rows] += got - 1

    def next_growth(self) -> int:
        """Pages that active rows lack to compute all tokens that they may know after the steps planned so far, and drafts of these."""
        rows = np.flatnonzero(self.active).astype(np.int32)
        tokens, limit = self.known_upper[rows] + self.policy.most, self.limit[rows]
        return sum(int(table.lacks(rows, tokens, limit).sum()) for table in self.tables)

    def most_growth(self, num_active: int) -> float:
        """Bounds `next_growth` without a look at the rows, where no active one has a prompt left to compute: they know at most one token
        more than they have pages for."""
        most = sum(table.layout.pages_for(1 + self.policy.most + table.ahead) for table in self.tables)
        return math.inf if self.num_media else most * num_active

    def early(
        self, rows: Int32Array, upper: Int32Array, limit: Int32Array, num_decode: int, deficits: list[Int32Array], available: int
    ) -> list[Int32Array]:
        """Pages that rows get for a step with drafts, by group. They lack `deficits` for `upper` tokens. The first num_decode decode.

        The idea: with drafts, rows fill their pages at times that nobody knows, some row nearly every step, and giving pages costs about as
        much for many rows as for one. So when a decode row lacks one, others that may soon lack one (`BlockTable.early`) get theirs too, if
        all these are `available`.
        """
        found = []
        for table, deficit in zip(self.tables, deficits, strict=True):
            if table.early and deficit[:num_decode].any():
                later = upper.copy()
                later[:num_decode] += table.early
                deficit = table.lacks(rows, later, limit)
            found.append(deficit)
        return found if sum(int(deficit.sum()) for deficit in found) <= available else deficits

    def append(self, rows: Int32Array, tokens: Int32Array, counts: Int32Array) -> None:
        """Commit the first `counts[i]` of `tokens[i]` ([M, 1+k]) to each row."""
        if tokens.shape[1] == 1 and (counts == 1).all():
            self.token_log[rows, self.known[rows]] = tokens[:, 0]
            self.known[rows] += 1
            return
        at, offset = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        to = rows[at]
        self.token_log[to, self.known[to] + offset] = tokens[at, offset]
        self.known[rows] += counts

    def check(self, pool: PagePool) -> None:
        """Raise AssertionError unless counters, block tables and the pool agree."""
        on = self.active
        assert (self.computed <= self.computed_upper)[on].all(), "more committed than planned"
        assert (self.known <= self.known_upper)[on].all(), "more tokens known than planned"
        assert (self.known <= self.known_lower)[on].all(), "fewer tokens are sure than there are"
        assert (self.known_lower <= self.known_upper)[on].all(), "more tokens are sure than possible"
        assert self.policy.most or (self.known_upper <= self.limit)[on].all(), "a row is planned past its limit"
        assert (self.computed_upper <= self.known_upper)[on].all(), "a row computes tokens that nobody knows"
        assert self.num_guided == int((self.guided & on).sum()), "guided rows are miscounted"
        assert not (self.held & ~(self.guided & on)).any(), "a row is held that is not guided"
        assert not (self.guided & ~self.held & (self.known_upper != self.known))[on].any(), "a guided row samples without a new mask"
        owners = np.zeros(pool.arena_pages, np.int64)
        for table in self.tables:
            span = np.arange(table.max_pages)
            inside = (span >= table.first[:, None]) & (span < table.used[:, None])
            assert np.array_equal(table.pages > 0, inside), f"group {table.layout.name}: holes in a block table, or pages outside of it"
            assert not table.used[~on].any(), f"group {table.layout.name}: a free row holds pages"
            filled = -(-np.minimum(self.computed_upper, self.limit - 1) // table.tokens_per_page)
            spare = table.layout.pages_for(table.ahead + self.policy.most_ahead + table.early) if self.policy.most else 0
            assert (filled <= table.used)[on].all(), f"group {table.layout.name}: tokens without a page"
            assert (table.used <= filled + spare)[on].all(), f"group {table.layout.name}: more pages than the tokens fill"
            needed = table.layout.group.needed_from(self.computed.astype(np.int64)) // table.tokens_per_page
            assert (table.first <= needed)[on].all(), f"group {table.layout.name}: a page was freed that is still read"
            owners += np.bincount(table.pages[inside], minlength=pool.arena_pages)
        pool.check(owners)
