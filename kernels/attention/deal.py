"""Decode rows dealt out to programs by pages: each gets as many, wherever rows begin and end.

Letters as in `work_list.py`. The pages of all rows, once for each key head, are one sequence: those of a head row by row, head after head,
so that programs that read a page's heads do so at about one time. Program p's are a piece of it. A unit is a row's pages for one head; a
piece begins and ends within units, which it shares with its neighbours, and all between are its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import next_power_of_2

ENTRY = 4  # numbers of a border
LEAST_PAGES = 4  # of a program
BORDERS = 8  # of a program of the list


@dataclass(frozen=True)
class DealtRows:
    """query_len, seq_len: [N] int32. borders: [programs + 1, ENTRY] int32, see `deal_pages`. arrivals: [N * HK] int32, zeros between launches: parts of a unit that ended.

    outputs: [2 * programs, G, D] float32 and sums: [2 * programs, 2, 8] float32: what a program leaves of the units that it shares.
    """

    programs: int
    query_len: torch.Tensor
    seq_len: torch.Tensor
    borders: torch.Tensor
    arrivals: torch.Tensor
    outputs: torch.Tensor
    sums: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def deal_pages(
    borders_ptr, arrivals_ptr, query_len_ptr, seq_len_ptr, num_rows, programs,
    PAGE: tl.constexpr, NUM_KV: tl.constexpr, LEAST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Border p, where program p begins: unit (head * N + row), page within it, first program of that unit and programs that share it.

    The last programs have nothing, where there are too few pages for all. A row without keys counts as one page.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    there = rows < num_rows
    keys = tl.load(seq_len_ptr + rows, mask=there, other=0) - tl.load(query_len_ptr + rows, mask=there, other=0)
    pages = tl.where(there, tl.maximum(tl.cdiv(keys, PAGE), 1), 0)
    ends = tl.cumsum(pages, 0)[None, :]
    pages = pages[None, :]
    of_head = tl.sum(pages).to(tl.int64)
    total = of_head * NUM_KV
    active = tl.minimum(tl.maximum(total // LEAST, 1), programs)

    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.minimum(p, active) * total // active
    head, rest = place // of_head, place % of_head
    before = ends <= rest[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    begin = tl.sum(tl.where(before, pages, 0), 1)
    size = tl.sum(tl.where(rows[None, :] == row[:, None], pages, 0), 1)
    unit_begin = head * of_head + begin
    first = ((unit_begin + 1) * active - 1) // total
    last = ((unit_begin + size) * active - 1) // total
    border, mask = borders_ptr + p * 4, p <= programs
    tl.store(border, (head * num_rows + row).to(tl.int32), mask=mask)
    tl.store(border + 1, (rest - begin).to(tl.int32), mask=mask)
    tl.store(border + 2, first.to(tl.int32), mask=mask)
    tl.store(border + 3, (last - first + 1).to(tl.int32), mask=mask)
    if tl.program_id(0) == 0:
        for head_of in range(NUM_KV):
            tl.store(arrivals_ptr + head_of * num_rows + rows, tl.zeros([BLOCK_ROWS], tl.int32), mask=there)


def deal_rows(programs: int, num_kv: int, group: int, dim: int, page: int, query_len: torch.Tensor, seq_len: torch.Tensor) -> DealtRows:
    """N rows of one query each dealt out. query_len, seq_len: [N] int32."""
    rows, device = query_len.shape[0], query_len.device
    borders = torch.empty((programs + 1, ENTRY), dtype=torch.int32, device=device)
    arrivals = torch.empty(rows * num_kv, dtype=torch.int32, device=device)
    outputs = torch.empty((2 * programs, group, dim), dtype=torch.float32, device=device)
    sums = torch.empty((2 * programs, 2, 8), dtype=torch.float32, device=device)
    deal_pages[(triton.cdiv(programs + 1, BORDERS),)](
        borders, arrivals, query_len, seq_len, rows, programs,
        PAGE=page, NUM_KV=num_kv, LEAST=LEAST_PAGES, BLOCK_ROWS=next_power_of_2(rows), BLOCK=BORDERS,
    )  # fmt: skip
    return DealtRows(programs, query_len, seq_len, borders, arrivals, outputs, sums)
