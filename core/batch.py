"""One step, as the host planned it (`Plan`) and as the device sees it (`Batch`); what comes back (`Record` words, `Outcome`).

Everything that crosses from host to device is a numpy array inside a frozen dataclass, so that it can be packed and broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from modelrunner.media import MediaBatch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class Finish(IntEnum):
    """Finish codes, decided on the device and carried by the record."""

    NONE = 0
    STOP = 1  # an end-of-sequence or stop token id was sampled
    LENGTH = 2  # the row's length limit was reached
    ERROR = 3  # no token had a finite, unmasked logit


class Feature(IntFlag):
    """What a row asks of a step, above all of its tail. The plan carries the union over its rows and so chooses the tail's kind.

    Bits from 256 to 2**29 belong to taps, one each (see `tap_set`); those from PROCESSOR_BIT on to Python functions and logits processors.
    """

    GREEDY = 0
    PLAIN = 1  # sampled with noise
    FILTERED = 2  # top-k, top-p or min-p cut the vocabulary first; goes with PLAIN
    ALLOWED = 4  # only listed ids
    BIASED = 8  # numbers added to listed ids
    KEPT_GOING = 16  # no stop id before min_tokens
    BANNED = 32  # bad words
    PENALISED = 64  # repetition, presence or frequency
    AUTOMATON = 128  # structured output by an automaton on the device
    LOGPROBS = 1 << 32  # log-probs of the sampled token and of the likeliest ones
    ALL_LOGPROBS = 1 << 33  # of the whole vocabulary; goes with LOGPROBS
    PROMPT_LOGPROBS = 1 << 34  # the same at the positions of the prompt
    ALL_PROMPT_LOGPROBS = 1 << 35  # goes with PROMPT_LOGPROBS
    MEDIA = 1 << 36  # of the body: some token takes its embedding from the arena of media, or stands before one that does


PROCESSOR_BIT = 1 << 40  # the first one stands for Python functions, each of the next for a logits processor
MASKED = Feature.ALLOWED | Feature.AUTOMATON  # logits of some ids are -inf
REWRITTEN = Feature.BIASED | Feature.KEPT_GOING | Feature.BANNED | Feature.PENALISED  # logits become others
EDITED = MASKED | REWRITTEN  # logits change before the draw


def as_built(features: Feature) -> Feature:
    """What a tail with `features` is built for: every edit of logits, if one of them is asked for, as tails and kernels of each mixture
    would be too many; but masks alone, those of structured output above all, which leave the logits in their own type."""
    if features & REWRITTEN:
        return features | EDITED
    return features | MASKED if features & MASKED else features


PROMPT = Feature.PROMPT_LOGPROBS | Feature.ALL_PROMPT_LOGPROBS  # what a row asks for until its prompt is computed
LOGGED = int(PROMPT | Feature.LOGPROBS)  # a step with any of these has log-probs to send
UNCAPTURED = PROMPT | Feature.ALL_LOGPROBS  # the host must know which rows ask, so no graph does it


class Record(IntEnum):
    """Word offsets in a record, [words] int32: one record per planned row. Sampled tokens follow from TOKENS on."""

    ROW = 0
    GENERATION = 1
    NUM_TOKENS = 2  # tokens sampled in the step: 0 for a chunk that is not the last, or a finished row
    FINISH = 3
    DRAFTED = 4  # drafts of the row that the step checked
    TOKENS = 5


def record_words(num_draft: int) -> int:
    """Words of a record when a row may yield up to 1 + num_draft tokens."""
    return Record.TOKENS + 1 + num_draft


@dataclass(frozen=True)
class Patch:
    """Edits of the request table, as runs of 32-bit words: run i writes `words[start_i : start_i + length[i]]` at word `dst[i]`,
    where start_i is the sum of the lengths before it. No two runs of a patch overlap.

    dst: [S] int64, length: [S] int32, words: [W] int32 (other dtypes bit-cast).
    """

    dst: Int64Array
    length: Int32Array
    words: Int32Array

    @property
    def empty(self) -> bool:
        return self.dst.size == 0


EMPTY_PATCH = Patch(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))


class PatchSink(Protocol):
    """A patch in the making: what the scheduler needs of `request_table.PatchBuilder`."""

    num_words: int

    def fits(self, num_words: int) -> bool: ...

    def row_words(self, values: Mapping[str, Any]) -> int: ...

    def row(self, row: int, values: Mapping[str, Any]) -> None: ...

    def line(self, name: str, seat: int, elements: Int32Array) -> None: ...

    def elements(self, name: str, rows: Int32Array, cols: Int32Array, values: Int32Array) -> None: ...

    def build(self) -> Patch: ...


@dataclass(frozen=True)
class Prompts:
    """What the host knows of the rows of a step that do not decode, exactly: their tokens were there before the step.

    query: [n] int32 query tokens. length: [n] int32 computed + query tokens. Both are to be read only.
    """

    query: Int32Array
    length: Int32Array


@dataclass(frozen=True)
class StepMedia:
    """What the tokens of a step, [T] in batch order, read of media. lines: [T] int32 of the arena, -1 for tokens of text. positions:
    [position_rows, T] int32, -1 for a token whose position follows from its index; None where all do. following: lines of the tokens after
    each, -1 also where they are not encoded yet; None where no drafter asks."""

    lines: Int32Array
    positions: Int32Array | None
    following: Int32Array | None = None


@dataclass(frozen=True)
class Plan:
    """What the host decided for one step. Decode rows (1 + num_draft query slots) come first, then prefill chunks.

    rows: [N] int32 request-table rows, in batch order. generations: [N] int32 tenancies. num_query: [N] int32 query tokens, of a decode
    row at most. num_tokens: query slots of the step. max_query: of a row.
    max_seq_len: upper bound over rows of computed + query tokens. table_pages: the same per cache group, in pages.
    features: union over rows. patch: applied before anything else. num_draft: drafts that a decode row may have in the step. num_next:
    drafts to be made after it.
    row_features: [N] int64, those of each row, where the host must know them (`UNCAPTURED`); else None.
    prompt_lengths: [N - num_decode] int32 computed + query tokens of the rows that do not decode, exact; None in plans that start-up makes
    up and of steps that are repeated. media: None unless features has MEDIA.
    """

    step: int
    rows: Int32Array
    generations: Int32Array
    num_query: Int32Array
    patch: Patch
    num_decode: int
    num_tokens: int
    max_query: int
    max_seq_len: int
    table_pages: tuple[int, ...]
    features: Feature = Feature.GREEDY
    num_draft: int = 0
    num_next: int = 0
    row_features: Int64Array | None = None
    prompt_lengths: Int32Array | None = None
    media: StepMedia | None = None

    @property
    def num_rows(self) -> int:
        return int(self.rows.size)

    @property
    def query_start(self) -> Int32Array:
        """First query slot of each row, and where the last row's end: [N + 1] int32."""
        slots = (
            self.num_query
            if not self.num_draft
            else np.where(np.arange(self.num_rows) < self.num_decode, 1 + self.num_draft, self.num_query)
        )
        return np.concatenate([[0], np.cumsum(slots)]).astype(np.int32)

    @property
    def prompts(self) -> Prompts | None:
        """The rows that do not decode; None if there are none, or their lengths are not known."""
        lengths = self.prompt_lengths
        return None if lengths is None or not lengths.size else Prompts(self.num_query[self.num_decode :], lengths)


@dataclass(frozen=True)
class Drain:
    """Answer of `plan()` when pages ran out: collect every step in flight and plan again; that plan may preempt."""

    reason: str


@dataclass(frozen=True)
class Ticket:
    """A launched step. `entry` names its pinned buffers and its ring entry."""

    plan: Plan
    entry: int


@dataclass(frozen=True)
class LogprobRecords:
    """Log-probs of a collected step, owned by the receiver; see `step_logprobs` for what is in them.

    rows: [N * (1 + num_draft), words] int32, those of a row of the plan one after the other; no line without a row that asks. positions:
    [P, words] int32, of the tokens of `spans`: (row's place, first token's place, token after the last, whether all of the vocabulary).
    row_lines, position_lines: [V] log-probs of
    those that want all of the vocabulary, by their number.
    """

    rows: Int32Array
    positions: Int32Array
    spans: tuple[tuple[int, int, int, bool], ...]
    row_lines: Mapping[int, Float32Array]
    position_lines: Mapping[int, Float32Array]


@dataclass(frozen=True)
class Outcome:
    """A collected step. records: [N, record_words] int32, row i for plan.rows[i], owned by the receiver.

    extra: [N, record bytes] uint8 of what taps report (see `tap_set`), None when no row asked. logprobs: None when no row asked.
    """

    plan: Plan
    records: Int32Array
    extra: npt.NDArray[np.uint8] | None = None
    logprobs: LogprobRecords | None = None


class Columns(dict[str, torch.Tensor]):
    """The request table's columns by name. One that nobody declared raises a KeyError that lists those that are there."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise KeyError(f"no column of the request table is called {name!r}; there are {', '.join(map(repr, self)) or 'none'}")


class Buffers(dict[str, torch.Tensor]):
    """Static buffers by name. One that nobody declared raises a KeyError that lists those that were."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise KeyError(f"no static buffer is called {name!r}; declared are {', '.join(map(repr, self)) or 'none'}")


@dataclass
class Batch:
    """The device's view of one step: slices of buffers whose addresses never change. N rows and T tokens, padding included.

    Host integers: num_rows N, num_tokens T, num_decode (the first rows, with 1 + num_draft query slots each; 0 in a captured step with
    prompts, which serves any number of them), max_query, max_seq_len (upper bounds); prompts: exact lengths of the rows after those, where
    the host has them. A decode row's slots hold its newest token and its drafts, of which there may be fewer than slots. A padded, held or
    finished row has query_len 0, seq_len 0 and slots of -1, and writes nothing.

    rows [N] int32: request-table row (padding: the scratch row).  query_start [N+1] int32: first token of each row in [0, T].
    query_len [N] int32: its live query tokens.  computed [N] int32: tokens in the cache before the step.
    seq_len [N] int32: computed + query_len, 0 for a dead row.  num_accepted [N] int32: tokens of the row's last step that count.
    samples [N] bool: the row reaches its last known token and so samples.  sample_index [N] int64: that token's place in [0, T), behind
    which its drafts lie.
    input_ids [T] int64, 0 for an invalid token.  positions [T] int64: index in the request, 0 for an invalid token.
    token_row [T] int64: place in [0, N) of the token's row.  token_valid [T] bool.
    slots: group -> [T] int64 token position in the group's cache, -1 to skip.  block_tables: group -> [N, pages] int32, 0 = null page.
    columns: the request table's columns by name.  buffers: the ModelState's static buffers.
    media: of steps that compute tokens of media or before them; None in all others (see `media.MediaBatch`).

    The sampler sees a step with drafts (num_draft k > 0) line by line: N * (1 + k) rows, 1 + k of each row of the step, of which line j has
    j drafts ahead of the row's known tokens.  samples: whether there is such a draft.  computed + query_len: position of the token to be
    chosen.  ahead [N * (1 + k)] int32: j; None in all other batches.
    """

    num_rows: int
    num_tokens: int
    num_decode: int
    max_query: int
    max_seq_len: int
    num_draft: int
    features: Feature
    rows: torch.Tensor
    query_start: torch.Tensor
    query_len: torch.Tensor
    computed: torch.Tensor
    seq_len: torch.Tensor
    num_accepted: torch.Tensor
    samples: torch.Tensor
    sample_index: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    token_row: torch.Tensor
    token_valid: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    block_tables: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    prompts: Prompts | None = None
    media: MediaBatch | None = None
    ahead: torch.Tensor | None = None

    def per_row(self, column: str) -> torch.Tensor:
        """D. A column's values of the step's rows: [N], or [N, width]; of a seated column, the elements in the row's seat (or defaults)."""
        values = self.columns[column].index_select(0, self.rows)
        lines = self.columns.get(f"{column}.seats")
        return values if lines is None else lines[values.long()]
