"""The runner's fixed-address buffers, and the `Batch` views that a step takes of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from modelrunner.batch import Batch, Buffers, Feature, Int32Array, Patch, Plan
from modelrunner.media_steps import MediaSteps
from modelrunner.model_state import Needs
from modelrunner.page_pool import GroupLayout

LONGEST = 2048  # query tokens of one prompt in a padded step: attention of more has better ways, which go by lengths
LINES = (torch.int32, torch.bool, torch.int32, torch.int32, torch.int32)  # rows, samples, computed, query_len, ahead of `Batch`

PLACES = np.arange(4096, dtype=np.int32)  # where the runs of a patch begin, if each is one word


@dataclass(frozen=True)
class Shape:
    """A step's shape after padding. num_rows, num_tokens: of the body, the first num_decode rows of which are decode rows. tail_rows: of
    the tail; the first rows of the body."""

    num_rows: int
    num_tokens: int
    num_decode: int
    max_query: int
    tail_rows: int


class Buckets:
    """Pads a step's rows and tokens up to given sizes, so that captured graphs (and tests of padding) meet few shapes."""

    def __init__(self, rows: Sequence[int], tokens: Sequence[int], max_rows: int) -> None:
        """rows, tokens: sizes to pad to; a larger step, or an empty list, is left as it is. max_rows: of an unpadded step."""
        self.rows = sorted(rows)
        self.tokens = sorted(tokens)
        self.max_rows = max_rows

    def shape(self, plan: Plan) -> Shape:
        """The padded shape. The body of a step with prompts depends on its tokens alone, where they are padded."""
        n, t = plan.num_rows, plan.num_tokens
        slots = 1 + plan.num_draft
        rows = _up(self.rows, n)
        if plan.num_decode == n:
            return Shape(rows, rows * slots, rows, plan.max_query, rows)
        if not self.tokens or t > self.tokens[-1] or plan.max_query > LONGEST:
            return Shape(rows, t, plan.num_decode, plan.max_query, rows)
        tokens = _up(self.tokens, t)
        most = self.body_rows
        return Shape(most, tokens, plan.num_decode, max(plan.max_query, tokens - t), min(rows, most))

    @property
    def body_rows(self) -> int:
        """Rows of a body that is padded to some number of tokens: all that there can be, and one that padding tokens belong to."""
        return self.max_rows + 1


def _up(sizes: Sequence[int], n: int) -> int:
    at = bisect_left(sizes, n)
    return sizes[at] if at < len(sizes) else n


class PlanPacker:
    """Lays a plan out as words: rows, generations, num_query, query_start at fixed places, then the patch.

    One packed plan is one host-to-device copy. Row arrays have fixed offsets so that a captured graph finds them.
    """

    def __init__(self, max_rows: int, max_patch_words: int) -> None:
        """max_rows: padded rows at most. max_patch_words: words of a patch, run overhead included."""
        self.max_rows = max_rows + max_rows % 2
        self.patch_start = 4 * self.max_rows + 2
        self.capacity = self.patch_start + max_patch_words

    def pack_rows(self, plan: Plan, shape: Shape, scratch_row: int, words: Int32Array) -> None:
        """Write the rows of `plan`, padded to `shape`, into `words`, before `patch_start`."""
        n, m, slots = plan.num_rows, self.max_rows, 1 + plan.num_draft
        rows, generations, num_query, query_start = words[:m], words[m : 2 * m], words[2 * m : 3 * m], words[3 * m : 4 * m + 2]
        padding = slice(n, shape.num_rows)
        rows[:n], generations[:n], num_query[:n] = plan.rows, plan.generations, plan.num_query
        rows[padding], generations[padding], num_query[padding] = scratch_row, -1, 0
        query_start[: n + 1] = plan.query_start
        if shape.num_decode == shape.num_rows:
            query_start[n + 1 : shape.num_rows + 1] = query_start[n] + slots * np.arange(1, shape.num_rows - n + 1)
        else:
            query_start[n + 1 : shape.num_rows + 1] = shape.num_tokens

    def pack_patch(self, patch: Patch, words: Int32Array) -> int:
        """Write the patch into `words`, from `patch_start` on; returns where it ends."""
        end = self.patch_start
        if patch.empty:
            return end
        single = patch.words.size == patch.dst.size <= PLACES.size  # no run is empty, so each is one word
        start = PLACES[: patch.dst.size] if single else np.cumsum(patch.length, dtype=np.int32) - patch.length
        for part in (patch.dst.view(np.int32), patch.length, start, patch.words):
            words[end : end + part.size] = part
            end += part.size
        return end


class StepBuffers:
    """Device buffers of the step's inputs; `batch(plan, shape)` slices them."""

    def __init__(
        self,
        needs: Needs,
        dtype: torch.dtype,
        layouts: Sequence[GroupLayout],
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        packer: PlanPacker,
        device: torch.device,
        num_draft: int = 0,
    ) -> None:
        """dtype: of activations. max_rows, max_tokens: of a padded step. num_draft: drafts of a row at most."""
        self.layouts = layouts
        self.packer = packer
        self.media: MediaSteps | None = None
        self.staging = torch.zeros(packer.capacity, dtype=torch.int32, device=device)

        def rows(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        def tokens(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_tokens, dtype=dtype, device=device)

        self.query_len, self.computed, self.seq_len, self.num_accepted = (rows(torch.int32) for _ in range(4))
        self.samples, self.sample_index = rows(torch.bool), rows(torch.int64)
        self.input_ids, self.positions, self.token_row = (tokens(torch.int64) for _ in range(3))
        self.token_valid = tokens(torch.bool)
        self.slots = {g.group.name: tokens(torch.int64) for g in layouts}
        self.block_tables = {
            g.group.name: torch.zeros(max_rows * -(-max_model_len // g.tokens_per_page), dtype=torch.int32, device=device) for g in layouts
        }
        self.hidden = torch.zeros(max_tokens, needs.hidden_size, dtype=dtype, device=device)
        lines = max_rows * (1 + num_draft)
        self.lines = [torch.zeros(lines, dtype=dtype, device=device) for dtype in LINES] if num_draft else []
        self.num_drafted = rows(torch.int32)
        self.sampled = torch.zeros(lines, needs.hidden_size, dtype=dtype, device=device)  # from a captured body to its tail
        sizes = {"tokens": max_tokens, "rows": max_rows}
        self.extra = Buffers(
            (b.name, torch.zeros([sizes[s] if isinstance(s, str) else s for s in b.shape], dtype=b.dtype, device=device))
            for b in needs.buffers
        )

    def row_inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the staged plan: rows, generations, num_query [N], query_start [N+1], int32."""
        m = self.packer.max_rows
        rows, generations, num_query = (self.staging[i * m : i * m + num_rows] for i in range(3))
        return rows, generations, num_query, self.staging[3 * m : 3 * m + num_rows + 1]

    def patch(self, num_runs: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the staged patch: dst [S] int64; length, start [S] and words [W] int32. Arguments of `apply_patch`."""
        first, sizes = self.packer.patch_start, [2 * num_runs, num_runs, num_runs, num_words]
        dst, length, start, words = torch.split(self.staging[first : first + sum(sizes)], sizes)
        return dst.view(torch.int64), length, start, words

    def tail(self, plan: Plan, shape: Shape, columns: Mapping[str, torch.Tensor]) -> Batch:
        """Views for the tail of a step with prompts: its rows, and no tokens."""
        return self.batch(plan, Shape(shape.tail_rows, 0, 0, shape.max_query, shape.tail_rows), columns)

    def batch(self, plan: Plan, shape: Shape, columns: Mapping[str, torch.Tensor]) -> Batch:
        """Views for one step."""
        n, t = shape.num_rows, shape.num_tokens
        rows, _, _, query_start = self.row_inputs(n)
        tables = {
            g.group.name: self.block_tables[g.group.name][: n * pages].view(n, pages)
            for g, pages in zip(self.layouts, plan.table_pages, strict=True)
        }
        slots = {name: slots[:t] for name, slots in self.slots.items()}
        for layout in self.layouts:
            for rider in layout.riders:
                tables[rider.group.name], slots[rider.group.name] = tables[layout.name], slots[layout.name]
        return Batch(
            num_rows=n,
            num_tokens=t,
            num_decode=shape.num_decode,
            max_query=shape.max_query,
            max_seq_len=plan.max_seq_len,
            num_draft=plan.num_draft,
            features=plan.features,
            rows=rows,
            query_start=query_start,
            query_len=self.query_len[:n],
            computed=self.computed[:n],
            seq_len=self.seq_len[:n],
            num_accepted=self.num_accepted[:n],
            samples=self.samples[:n],
            sample_index=self.sample_index[:n],
            input_ids=self.input_ids[:t],
            positions=self.positions[:t],
            token_row=self.token_row[:t],
            token_valid=self.token_valid[:t],
            slots=slots,
            block_tables=tables,
            columns=columns,
            buffers=self.extra,
            prompts=plan.prompts,
            media=self.media.view(t) if self.media is not None and plan.features & Feature.MEDIA else None,
        )
