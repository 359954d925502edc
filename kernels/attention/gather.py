"""Keys and values of some rows, gathered from their pages into memory that is contiguous: for attention that reads no pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import next_power_of_2
from modelrunner.kernels.attention.index import rows_per_page


@triton.jit
def copy_pages(
    out_ptr, cache_ptr, table_ptr, start_ptr, seq_len_ptr, table_row, page_rows,
    PAGE: tl.constexpr, TOKEN: tl.constexpr, BLOCK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of PAGES pages, row): copy those that the row has. TOKEN: elements of a token's keys and values."""
    row = tl.program_id(1)
    seq_len = tl.load(seq_len_ptr + row)
    first = tl.program_id(0) * PAGES
    if first * PAGE < seq_len:
        start = tl.load(start_ptr + row).to(tl.int64)
        for page in range(first, tl.minimum(first + PAGES, tl.cdiv(seq_len, PAGE))):
            source = cache_ptr + tl.load(table_ptr + row.to(tl.int64) * table_row + page).to(tl.int64) * page_rows * TOKEN
            target = out_ptr + (start + page * PAGE) * TOKEN
            for begin in tl.static_range(0, PAGE * TOKEN, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                mask = at < PAGE * TOKEN
                tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
