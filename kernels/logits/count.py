"""Counting tokens in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl

BLOCK = 1024


@triton.jit
def _count_tokens(
    rows, samples, seats, counted, prompt_len, known, token_ids, longest, counts, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program n: row n. Integer additions, which no order changes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    row = tl.load(rows + n).to(tl.int64)
    seat = tl.load(seats + row).to(tl.int64)
    if tl.load(samples + n) & (seat >= 0):
        done, upto, first = tl.load(counted + row), tl.load(known + row), tl.load(prompt_len + row)
        line = counts + seat * vocab
        if done == 0:
            for begin in range(0, vocab, BLOCK):
                ids = begin + tl.arange(0, BLOCK)
                tl.store(line + ids, tl.zeros([BLOCK], tl.int32), mask=ids < vocab)
            tl.debug_barrier()  # the line is clear for every thread
        for begin in range(done, upto, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            mask = place < upto
            ids = tl.load(token_ids + row * longest + place, mask=mask, other=0)
            tl.atomic_or(line + ids, 1, mask=mask & (place < first))
            tl.atomic_add(line + ids, 2, mask=mask & (place >= first))
        tl.store(counted + row, upto)


def count_tokens(
    rows: torch.Tensor,
    samples: torch.Tensor,
    seats: torch.Tensor,
    counted: torch.Tensor,
    prompt_len: torch.Tensor,
    known: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `reference.count_tokens`: one launch."""
    if rows.shape[0]:
        tables = (seats, counted, prompt_len, known, token_ids, token_ids.stride(0))
        _count_tokens[(rows.shape[0],)](rows, samples, *tables, counts, counts.shape[1], BLOCK, num_warps=4, **pdl(counts))
