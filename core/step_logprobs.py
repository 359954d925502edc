"""Log-probs of a step, from the device to the host.

Of each row a record of words: the rank of the sampled token, the ids of that token and of the likeliest ones, and their log-probs; in a
step with drafts, such a record for each place of the row's run, whether it counts or not. Records leave through a ring, like those of the
step. The positions of prompts that are asked for have records of the same form, made of the hidden states a slice at a time, so that a
long prompt takes no more memory than a short one. A row that wants more than a record holds has all its log-probs copied to the host, a
line of the vocabulary at a time; only then is memory allocated in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from modelrunner.batch import Batch, Feature, Float32Array, Int32Array, LogprobRecords, Plan
from modelrunner.device import Device, Event
from modelrunner.extras import RecordRing
from modelrunner.kernels.logprobs.reference import log_softmax
from modelrunner.ops import Ops

SLICE = 128  # positions of a prompt at a time


@dataclass
class Asked:
    """What rows of one step ask for beside records. Made on the host; the device's work fills `row_lines` and `prompt_lines`.

    whole_rows: places of rows that want the whole vocabulary. spans: (row's place, first token's place, token after the last, whether
    all of the vocabulary) for each prompt that is asked about. row_lines: place -> [V]; prompt_lines: number of the prompt's record -> [V].
    """

    whole_rows: tuple[int, ...] = ()
    spans: tuple[tuple[int, int, int, bool], ...] = ()
    row_lines: dict[int, torch.Tensor] = field(default_factory=dict)
    prompt_lines: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> Asked:
        if plan.row_features is None:
            return NOTHING
        start = plan.query_start
        whole = np.flatnonzero(plan.row_features & Feature.ALL_LOGPROBS)
        prompts = np.flatnonzero(plan.row_features & Feature.PROMPT_LOGPROBS)
        spans = [
            (at, int(start[at]), int(start[at] + plan.num_query[at]), bool(plan.row_features[at] & Feature.ALL_PROMPT_LOGPROBS))
            for at in prompts.tolist()
        ]
        return cls(tuple(whole.tolist()), tuple(spans))

    @property
    def num_positions(self) -> int:
        return sum(stop - start for _, start, stop, _ in self.spans)


NOTHING = Asked()  # of a step whose rows ask for records at most


class StepLogprobs:
    """The rings of a runner. `note`, `send` and `prompts` run on the device, `download` and `take` on the host."""

    def __init__(
        self,
        device: Device,
        ops: Ops,
        columns: Mapping[str, torch.Tensor],
        entries: int,
        rows: int,
        tokens: int,
        num_top: int,
        max_draft: int = 0,
    ) -> None:
        """rows, tokens: of a padded step. num_top: the likeliest tokens in a record. max_draft: drafts of a row, at most."""
        self.device, self.ops, self.columns = device, ops, columns
        self.num_top = num_top
        size = 4 * (1 + 2 * (1 + num_top))
        self.rows, self.positions = (RecordRing(device, entries, lines, size) for lines in (rows * (1 + max_draft), tokens))
        self._open: list[tuple[Asked, Event | None, Event | None] | None] = [None] * entries

    # ---- the device ------------------------------------------------------------------------------------------------

    def note(self, asked: Asked, slots: int, start: int, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """D. Make records. slots: lines of a row. logits: [m, V], of lines `start` onwards of the step. tokens: [m] int64. rows: [m] int32,
        whose lines they are.
        """
        self._record(self.rows, start, logits, tokens, rows, "logprobs")
        for place in asked.whole_rows:  # such a row has no drafts: its first line is all
            if 0 <= place * slots - start < rows.shape[0]:
                asked.row_lines[place] = self._line(logits[place * slots - start])

    def send(self, num_lines: int, counter: torch.Tensor) -> None:
        self.rows.send(num_lines, counter)

    def prompts(
        self, asked: Asked, hidden: torch.Tensor, batch: Batch, head: Callable[[torch.Tensor], torch.Tensor], counter: torch.Tensor
    ) -> None:
        """D. Records of the prompts' positions, of the token that follows at each. hidden: [T, H]. head: hidden states to logits."""
        done, total = 0, hidden.shape[0]
        for _, start, stop, whole in asked.spans:
            for begin in range(start, stop, SLICE):
                count = min(SLICE, stop - begin)
                first = max(min(begin, total - SLICE), 0)  # a slice has so many lines, whatever is asked for
                own = slice(begin, begin + count)
                rows = batch.rows.index_select(0, batch.token_row[own])
                follows = (batch.positions[own] + 1).clamp(max=self.columns["token_ids"].shape[1] - 1)
                tokens = self.columns["token_ids"][rows.long(), follows].long()
                logits = head(hidden[first : min(first + SLICE, total)])[begin - first : begin - first + count]
                self._record(self.positions, done, logits, tokens, rows, "prompt_logprobs")
                if whole:
                    asked.prompt_lines.update({done + i: self._line(logits[i]) for i in range(count)})
                done += count
        self.positions.send(done, counter)

    def _record(self, ring: RecordRing, start: int, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, column: str) -> None:
        ranks, ids, values = self.ops.token_logprobs(logits, tokens, rows, self.columns[column], self.num_top)
        words = ring.packed[start : start + len(ranks)].view(torch.int32)
        torch.cat((ranks.unsqueeze(1), ids, values.view(torch.int32)), 1, out=words)

    def _line(self, logits: torch.Tensor) -> torch.Tensor:
        """All log-probs of a line, in memory of the host once the device has come so far."""
        line = log_softmax(logits.float().unsqueeze(0))[0]
        host = torch.empty(line.shape, pin_memory=line.is_cuda)
        return host.copy_(line, non_blocking=True)

    # ---- the host --------------------------------------------------------------------------------------------------

    def download(self, entry: int, plan: Plan, asked: Asked) -> None:
        """Fetch the records of a step that was launched and has some of the features `LOGGED`."""
        rows = self.rows.download(entry, plan.num_rows * (1 + plan.num_draft)) if plan.features & Feature.LOGPROBS else None
        positions = self.positions.download(entry, asked.num_positions) if asked.spans else None
        self._open[entry] = asked, rows, positions

    def take(self, entry: int, plan: Plan) -> LogprobRecords | None:
        """Wait for the records of a step and take them; None if it makes none."""
        if (waiting := self._open[entry]) is None:
            return None
        self._open[entry] = None
        asked, rows, positions = waiting

        def words(ring: RecordRing, event: Event | None, count: int) -> Int32Array:
            if event is None:
                return np.empty((0, 0), np.int32)
            event.wait()
            return ring.take(entry, count).view(np.int32)

        def lines(tensors: Mapping[int, torch.Tensor]) -> dict[int, Float32Array]:
            return {number: tensor.numpy() for number, tensor in tensors.items()}

        records = words(self.rows, rows, plan.num_rows * (1 + plan.num_draft)), words(self.positions, positions, asked.num_positions)
        return LogprobRecords(*records, asked.spans, lines(asked.row_lines), lines(asked.prompt_lines))

    def poison(self, entry: int, byte: int) -> None:
        """D. Overwrite an entry that was given back."""
        for ring in (self.rows, self.positions):
            ring.ring[entry].fill_(byte)
