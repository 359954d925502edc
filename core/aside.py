"""Tokens of repeated steps on their way from records to the token log.

Each step would write to as many distant places of the log as there are rows. The idea: many steps' tokens are laid aside first, and then
those of a row go to the log together. With drafts, how many tokens a row gets differs from step to step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelrunner.batch import Int32Array, Int64Array, Record

MOST_KEPT = 32  # steps that are laid aside,
MOST_OF_FEW = 128  # or of few rows so many, as long as they have
FEW_TOKENS = 2048  # records together
FEW_ROWS = 128  # up to so many, records are kept as they are: for each further step that costs least
WIDTH = 4  # bytes of a token
COUNTS = slice(None), int(Record.NUM_TOKENS)
DRAFTS = slice(None), int(Record.DRAFTED)
NUMBERS = slice(None), slice(int(Record.NUM_TOKENS), int(Record.DRAFTED) + 1, int(Record.DRAFTED - Record.NUM_TOKENS))  # both
TOKENS = WIDTH * int(Record.TOKENS)  # bytes before them

Numbers = NDArray[np.integer]


def most_kept(num_rows: int) -> int:
    """Steps of so many rows whose tokens are laid aside at most."""
    return max(MOST_KEPT, min(MOST_OF_FEW, FEW_TOKENS // num_rows))


class Aside:
    """Tokens of steps with drafts. It serves one log, and one run of steps with the same rows at a time.

    steps: laid aside now. Those of few rows are kept as records. Those of many are written row by row to memory that a processor's cache
    holds, so that what a row gets there lies together.
    """

    def __init__(self, log: Int32Array, most_slots: int) -> None:
        """log: [max_rows, max_model_len], contiguous. most_slots: tokens that a row may get in a step."""
        self._log = log
        self._memory = np.zeros(log.shape[0] * MOST_KEPT * most_slots, np.int32)
        self._every_number = np.zeros(2 * MOST_KEPT * log.shape[0], np.int16)
        self._kept: list[Int32Array] = []
        self.steps = 0

    def begin(self, rows: Int32Array, slots: int) -> None:
        """From now on steps are of `rows` [N], and have up to `slots` tokens of each. Nothing is laid aside."""
        self._rows, self._slots, self._few = rows, slots, rows.size <= FEW_ROWS
        self._line = MOST_KEPT * slots  # tokens that there is room for, of a row
        self._first = np.arange(rows.size) * self._line
        self._place: Int64Array = self._first.copy()  # where each row's next token goes
        self._runs = runs(self._memory, slots)
        self._numbers = self._every_number[: 2 * MOST_KEPT * rows.size].reshape(2, MOST_KEPT, rows.size)
        self._kept.clear()
        self.steps = 0

    def add(self, records: Int32Array) -> None:
        """Lay the tokens of a step aside: records [N, words], contiguous, which nobody changes. None of them ends a row."""
        if self._few:
            self._kept.append(records)
        else:  # all slots of a row, of which those that do not count are written over by the next step
            tokens = np.ndarray(self._place.shape, self._runs.dtype, records, TOKENS, records.strides[:1])
            self._runs[self._place] = tokens
            self._place += records[COUNTS]
            self._numbers[:, self.steps] = records[NUMBERS].T
        self.steps += 1

    def sums(self, start: int) -> tuple[int, int]:
        """Tokens and drafts in the steps laid aside, from the one numbered `start` on."""
        if not self._few:
            tokens, drafts = self._numbers[:, start : self.steps].sum((1, 2)).tolist()
            return tokens, drafts
        kept = self._kept[start:]
        return sum(int(np.add.reduce(each[COUNTS])) for each in kept), sum(int(np.add.reduce(each[DRAFTS])) for each in kept)

    def empty(self, known: Int32Array) -> tuple[Int64Array, Numbers, Numbers]:
        """Write everything to the log, behind the `known` [N] tokens of each row; what lies in the log behind all this is undefined then.

        Returns how many there were of each row, [N], and its tokens and drafts of each step, [steps, N], which hold until the next `add`.
        """
        start = self._rows.astype(np.int64) * self._log.shape[1] + known
        if self._few:
            total, counts, drafted = self._write_records(start)
        else:
            counts, drafted = self._numbers[:, : self.steps]
            total = self._place - self._first
            self._write_lines(start, known, total)
            self._place[:] = self._first
        self.steps = 0
        return total, counts, drafted

    def _write_records(self, start: Int64Array) -> tuple[Int64Array, Numbers, Numbers]:
        """All slots of a step at once, in order of steps: those that do not count lie where the next step's go, and later there is room, as
        no row comes to its end in these steps."""
        records = np.concatenate(self._kept).reshape(self.steps, self._rows.size, -1)
        self._kept.clear()
        counts, drafted = records[:, :, Record.NUM_TOKENS], records[:, :, Record.DRAFTED]
        ends = counts.cumsum(0)
        items = runs(self._log, self._slots)
        tokens = np.ascontiguousarray(records[:, :, Record.TOKENS : Record.TOKENS + self._slots])
        items[(ends - counts + start).ravel()] = tokens.view(items.dtype).ravel()
        return ends[-1], counts, drafted

    def _write_lines(self, start: Int64Array, known: Int32Array, total: Int64Array) -> None:
        """As much of each row as of the one with most, unless that would be more than the log has room for."""
        width = int(total.max())
        lines = np.ndarray(start.shape, f"V{WIDTH * width}", self._memory, strides=(WIDTH * self._line,))
        fits = known + width <= self._log.shape[1]
        if not fits.all():
            which = (~fits).nonzero()[0]
            at, offset = np.nonzero(np.arange(width) < total[which, None])
            at = which[at]
            self._log.reshape(-1)[start[at] + offset] = self._memory[self._first[at] + offset]
            start, lines = start[fits], lines[fits]
        runs(self._log, width)[start] = lines


def runs(words: Int32Array, length: int) -> NDArray[np.void]:
    """All runs of `length` words in a contiguous array, by where they begin, as items that overlap. numpy moves an item at once; a row of
    a window of the same size takes it four times as long."""
    return np.ndarray((words.size - length + 1,), f"V{WIDTH * length}", words, strides=(WIDTH,))
