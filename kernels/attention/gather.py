"""Keys and values of some rows, copied out of their pages: for attention kernels that read no pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import next_power_of_2
from modelrunner.kernels.attention.index import rows_per_page

BLOCK = 4096  # elements that a program copies at a time


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lengths_ptr"])
def copy_pages(
    out_ptr, cache_ptr, table_ptr, starts_ptr, lengths_ptr, table_row, page_rows,
    PAGE: tl.constexpr, TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (page of a row, row). TOKEN: elements of a token's keys and values."""
    row = tl.program_id(1)
    first = tl.program_id(0) * PAGE
    start = tl.load(starts_ptr + row)
    room = (tl.load(starts_ptr + row + 1) - start - first) * TOKEN  # elements up to the next row's
    if room > 0:
        there = (tl.load(lengths_ptr + row) - first) * TOKEN
        page = tl.load(table_ptr + row.to(tl.int64) * table_row + first // PAGE, mask=there > 0, other=0)
        source = cache_ptr + page.to(tl.int64) * page_rows * TOKEN
        target = out_ptr + (start + first).to(tl.int64) * TOKEN
        for begin in tl.static_range(0, PAGE * TOKEN, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = at < PAGE * TOKEN
            x = tl.load(source + at, mask=inside & (at < there), other=0.0)
            tl.store(target + at, x.to(out_ptr.dtype.element_ty), mask=inside & (at < room))


def gather_pages(
    cache: torch.Tensor, block_table: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, *, max_tokens: int
) -> None:
    """`kernels.attention.reference.gather_pages` in one launch."""
    num_rows, page = lengths.shape[0], cache.shape[1]
    token = cache.stride(1)
    if not num_rows or max_tokens < 1:
        return
    copy_pages[(triton.cdiv(max_tokens, page), num_rows)](
        out,
        cache,
        block_table,
        starts,
        lengths,
        block_table.stride(0),
        rows_per_page(cache),
        PAGE=page,
        TOKEN=token,
        BLOCK=min(BLOCK, next_power_of_2(page * token)),
        num_warps=8,
    )
