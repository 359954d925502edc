"""Decode rows dealt out to programs by pages: each gets about as many, wherever rows begin and end.

Letters as in `work_list.py`. The pages of all rows, once for each key head, are one sequence: those of a head row by row, head after head,
so that programs that read a page's heads do so at about one time. Program p's are a piece of it. A unit is a row's pages for one head; a
piece begins and ends within units, which it shares with its neighbours, and all between are its own.

Who shares a unit writes a part, waits for memory to have it, and counts, which takes as long as reading some pages. So where rows are about
as long as each other, and programs would read little more with whole units, each has whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from modelrunner.kernels.attention.device import next_power_of_2

PIECE = 16  # numbers that say what a program's piece is, see `deal_pages`
FIRST_PAGES = 4  # of its first pages
LEAST_PAGES = 4  # of a program
AT_ONCE = 8  # pieces of a program of the list
CUT_PAGES = 12  # that a program reads in the time that sharing a unit takes


@dataclass(frozen=True)
class DealtRows:
    """query_len, seq_len: [N] int32. pieces: [programs, PIECE] int32. arrivals: [N * HK] int32: parts that ended, zeros between launches.

    outputs: [2 * programs, G, D] float32 and sums: [2 * programs, 2, 8] float32: what a program leaves of the units that it shares, of the
    one that begins elsewhere and of the one that ends elsewhere.
    """

    programs: int
    query_len: torch.Tensor
    seq_len: torch.Tensor
    pieces: torch.Tensor
    arrivals: torch.Tensor
    outputs: torch.Tensor
    sums: torch.Tensor


@triton.jit
def _border(p, ends, pages, rows, num_rows, active, whole, NUM_KV: tl.constexpr):
    """Where program p [P] begins: unit (head * N + row), page within it, first program of that unit and programs that share it, and row.

    ends, pages: [1, N] of rows. A head's pages are the last of ends. whole: at a unit's first page, and no unit is shared.
    """
    of_head = tl.sum(pages).to(tl.int64)
    total = of_head * NUM_KV
    place = tl.minimum(p, active) * total // active
    if whole:
        unit = tl.minimum(p, active) * (num_rows * NUM_KV) // active
        place = unit // num_rows * of_head + tl.sum(tl.where(rows[None, :] < (unit % num_rows)[:, None], pages, 0), 1)
    head, rest = place // of_head, place % of_head
    before = ends <= rest[:, None]
    row = tl.sum(before.to(tl.int32), 1)
    begin = tl.sum(tl.where(before, pages, 0), 1)
    size = tl.sum(tl.where(rows[None, :] == row[:, None], pages, 0), 1)
    unit_begin = head * of_head + begin
    first = ((unit_begin + 1) * active - 1) // total
    last = ((unit_begin + size) * active - 1) // total
    return (head * num_rows + row).to(tl.int32), (rest - begin).to(tl.int32), first.to(tl.int32), (last - first + 1).to(tl.int32), row


@triton.jit(do_not_specialize=["num_rows", "columns", "table_row"])
def deal_pages(
    pieces_ptr, arrivals_ptr, table_ptr, query_len_ptr, seq_len_ptr, num_rows, programs, columns, table_row,
    PAGE: tl.constexpr, NUM_KV: tl.constexpr, LEAST: tl.constexpr, CUT: tl.constexpr, FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what each program's piece is: where it begins and ends, each unit, page, first program and programs (`_border`); then what the
    program starts with, lest it look that up: old keys of its first unit's row, and the numbers of its first FIRST pages.

    The last programs have nothing, where there are too few pages for all. A row without keys counts as one page. Units are whole if no
    program then has over CUT pages more than a fair share.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    there = rows < num_rows
    keys = tl.load(seq_len_ptr + rows, mask=there, other=0) - tl.load(query_len_ptr + rows, mask=there, other=0)
    pages = tl.where(there, tl.maximum(tl.cdiv(keys, PAGE), 1), 0)
    ends = tl.cumsum(pages, 0)[None, :]
    pages = pages[None, :]
    active = tl.minimum(tl.maximum(tl.sum(pages) * NUM_KV // LEAST, 1), programs).to(tl.int64)
    most = tl.cdiv(num_rows * NUM_KV, active) * tl.max(pages)  # pages of a program of whole units
    whole = most * active <= tl.sum(pages) * NUM_KV + CUT * active
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = p < programs
    unit, page, first, parts, row = _border(p, ends, pages, rows, num_rows, active, whole, NUM_KV)
    end_unit, end_page, end_first, end_parts, end_row = _border(p + 1, ends, pages, rows, num_rows, active, whole, NUM_KV)
    piece = pieces_ptr + p * 16
    tl.store(piece, unit, mask=mask)
    tl.store(piece + 1, page, mask=mask)
    tl.store(piece + 2, first, mask=mask)
    tl.store(piece + 3, parts, mask=mask)
    tl.store(piece + 4, end_unit, mask=mask)
    tl.store(piece + 5, end_page, mask=mask)
    tl.store(piece + 6, end_first, mask=mask)
    tl.store(piece + 7, end_parts, mask=mask)
    # The unit that ends in another program comes first.
    cut = end_page > tl.where(unit == end_unit, page, 0)
    row = tl.where(cut, end_row, row)
    page = tl.where(cut & (unit != end_unit), 0, page)
    tl.store(piece + 8, tl.sum(tl.where(rows[None, :] == row[:, None], keys[None, :], 0), 1), mask=mask)
    for i in tl.static_range(FIRST):
        inside = mask & (page + i < columns) & (row < num_rows)
        tl.store(piece + 9 + i, tl.load(table_ptr + row.to(tl.int64) * table_row + page + i, mask=inside, other=0), mask=mask)
    if tl.program_id(0) == 0:
        for head in range(NUM_KV):
            tl.store(arrivals_ptr + head * num_rows + rows, tl.zeros([BLOCK_ROWS], tl.int32), mask=there)


def deal_rows(
    programs: int, num_kv: int, group: int, dim: int, page: int, block_table: torch.Tensor, query_len: torch.Tensor, seq_len: torch.Tensor
) -> DealtRows:
    """N rows of one query each dealt out. block_table: [N, P] int32; query_len, seq_len: [N] int32."""
    rows, device = query_len.shape[0], query_len.device
    pieces = torch.empty((programs, PIECE), dtype=torch.int32, device=device)
    arrivals = torch.empty(rows * num_kv, dtype=torch.int32, device=device)
    outputs = torch.empty((2 * programs, group, dim), dtype=torch.float32, device=device)
    sums = torch.empty((2 * programs, 2, 8), dtype=torch.float32, device=device)
    deal_pages[(triton.cdiv(programs, AT_ONCE),)](
        pieces, arrivals, block_table, query_len, seq_len, rows, programs, block_table.shape[1], block_table.stride(0),
        PAGE=page, NUM_KV=num_kv, LEAST=LEAST_PAGES, CUT=CUT_PAGES, FIRST=FIRST_PAGES, BLOCK_ROWS=next_power_of_2(rows), BLOCK=AT_ONCE,
    )  # fmt: skip
    return DealtRows(programs, query_len, seq_len, pieces, arrivals, outputs, sums)
