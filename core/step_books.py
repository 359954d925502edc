"""What the scheduler writes down: of a plan in the making, of one that may be undone, of a committed step, and since its start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from modelrunner.batch import PROMPT, UNCAPTURED, Feature, Int64Array, PatchSink, Plan
from modelrunner.page_pool import Int32Array, PagePool
from modelrunner.request import Request
from modelrunner.rows import BoolArray, Growth, HostRows
from modelrunner.waiting import Entry


@dataclass
class Stats:
    """Counters since start. steps: committed ones. preemptions: rows taken from running requests. prompt_tokens: of admitted
    requests, once for several choices.
    cached_tokens: found in the prefix cache at admissions and resumptions. computed_tokens: query tokens of committed steps.
    generated_tokens: committed output. held: times that a row was left out of a plan because the mask of its next token was not there.
    num_drafted, num_accepted: drafts that steps checked, and those that became output. drafted_at, accepted_at: the same by place among
    the drafts of a row, from the first on; they are brought up to date when a row leaves, and now and then."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def checked(self, drafted: Int32Array, counts: Int32Array) -> Int32Array:
        """Count the drafts that a step checked of some rows, which got `counts` tokens each. Returns how many of each row were kept."""
        accepted: Int32Array = np.minimum(np.maximum(counts - 1, 0), drafted)
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        return accepted

    def by_place(self, drafted: npt.NDArray[np.integer], accepted: npt.NDArray[np.integer]) -> None:
        """Count them by their place."""
        self.drafted_at = [before + more for before, more in zip(self.drafted_at, above(drafted, len(self.drafted_at)), strict=True)]
        self.accepted_at = [before + more for before, more in zip(self.accepted_at, above(accepted, len(self.accepted_at)), strict=True)]

    def admitted(self, entry: Entry, sign: int) -> None:
        """Count an admission, or with sign -1 take it back."""
        self.cached_tokens += sign * entry.cached
        if not entry.request.num_preemptions and not entry.request.choice:
            self.prompt_tokens += sign * len(entry.request.prompt_token_ids)


def above(counts: npt.NDArray[np.integer], places: int) -> list[int]:
    """How many of `counts`, none of which is negative, are above 0, above 1, and so on."""
    found: list[int] = []
    for place in range(places):
        found.append(int(np.count_nonzero(counts > place)))
        if not found[-1]:
            break
    return found + [0] * (places - len(found))


@dataclass(frozen=True)
class Committed:
    """What a collected step brought. rows [M] int32: rows with new tokens; a request of `finished` has left its row already.
    tokens [M, 1+k] int32, of which the first num_tokens [M] int32 count. finished: requests that ended."""

    rows: Int32Array
    tokens: Int32Array
    num_tokens: Int32Array
    finished: list[Request]


@dataclass(slots=True)
class Undo:
    """What `rollback` needs: the plan, which rows it makes sample, the pages it gave, whom it admitted, and the former last tickets."""

    plan: Plan
    sampled: BoolArray
    growths: list[Growth]
    admitted: list[Entry]
    last_ticket: npt.NDArray[np.int64] | int


@dataclass
class Draft:
    """A plan in the making. chunks: (rows, query tokens of each) in batch order; sampled: which of them sample. num_draft: as in a plan."""

    builder: PatchSink
    budget: int
    num_decode: int
    num_draft: int = 0
    chunks: list[tuple[Int32Array, Int32Array]] = field(default_factory=list)
    sampled: list[BoolArray] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    admitted: list[Entry] = field(default_factory=list)

    def take(self, table: HostRows, rows: Int32Array, counts: Int32Array) -> None:
        """Let `rows` compute `counts` tokens."""
        self.chunks.append((rows, counts))
        self.sampled.append(table.advance(rows, counts))

    def admit(self, entries: list[Entry], chunks: list[int], sampled: list[bool]) -> Int32Array:
        """Note whom the step admitted, and the chunks for which their rows have advanced. Returns the rows."""
        rows = np.array([entry.request.row for entry in entries], np.int32)
        self.chunks.append((rows, np.array(chunks, np.int32)))
        self.sampled.append(np.array(sampled, np.bool_))
        self.admitted += entries
        return rows

    def spend(self, counts: Int32Array) -> None:
        """Take the query slots of the step's first rows, which have `counts` tokens each, off the budget."""
        self.budget -= self.num_decode * (1 + self.num_draft) + int(counts[self.num_decode :].sum())

    def grow(self, table: HostRows, rows: Int32Array, deficits: list[Int32Array], pool: PagePool) -> None:
        """Give rows the pages that they lack, by group."""
        for group, deficit in zip(table.tables, deficits, strict=True):
            if deficit.any():
                self.growths.append(group.grow(rows, deficit, pool))
                note_growth(self.builder, group.layout.name, self.growths[-1])

    def plan(self, step: int, table: HostRows, num_next: int = 0) -> Plan | None:
        """The plan, None if it is empty. num_next: as in a plan."""
        rows = np.concatenate([rows for rows, _ in self.chunks])
        if not rows.size:
            return None
        num_query = np.concatenate([counts for _, counts in self.chunks])
        lengths = np.minimum(table.computed_upper[rows], table.limit[rows] - 1)
        slots = 1 + self.num_draft if self.num_decode else 1
        prompts = num_query[self.num_decode :]
        max_seq_len = int(lengths.max())
        features, row_features = self._features(table.features[rows])
        return Plan(
            step=step,
            rows=rows,
            generations=table.generation[rows],
            num_query=num_query,
            patch=self.builder.build(),
            num_decode=self.num_decode,
            num_tokens=self.num_decode * slots + int(prompts.sum()),
            max_query=max(slots, int(prompts.max(initial=0))),
            max_seq_len=max_seq_len,
            table_pages=tuple(t.layout.pages_for(max_seq_len) for t in table.tables),
            features=features,
            num_draft=self.num_draft,
            num_next=num_next,
            row_features=row_features,
            prompt_lengths=lengths[self.num_decode :],
        )

    def _features(self, features: Int64Array) -> tuple[Feature, Int64Array | None]:
        """Those of the step and, where the host must know them, of its rows. Rows that decode have their prompts behind them."""
        union = Feature(int(np.bitwise_or.reduce(features)))
        if not union & UNCAPTURED:
            return union, None
        features[: self.num_decode] &= ~int(PROMPT)
        return Feature(int(np.bitwise_or.reduce(features))), features


def note_growth(builder: PatchSink, group: str, growth: Growth) -> None:
    """Put new pages into a patch."""
    builder.elements(f"pages.{group}", growth.rows, growth.cols, growth.pages)
