"""What a step takes from the request table, one launch an operation, and all of it in one launch.

Letters: R table rows, N rows and T tokens of the step, L longest sequence, P pages of a block table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.batch import reference

NULL_PAGE = tl.constexpr(reference.NULL_PAGE)
SKIP_SLOT = tl.constexpr(reference.SKIP_SLOT)
# Every step has its own sizes; a kernel that were built for some of them would be built again while requests wait.
_ANY_SIZE = ["N", "T", "P", "halvings", "token_programs"]


@triton.jit
def planned_row(i, mask, rows_ptr, num_query_ptr, generations_ptr, computed_ptr, known_ptr, finished_ptr, generation_ptr, drafts_ptr):
    """`gather_rows` of planned rows i: their table rows, query tokens, tokens computed and known. drafts_ptr None: there are none."""
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    num_query = tl.load(num_query_ptr + i, mask=mask, other=0)
    tenancy = tl.load(generations_ptr + i, mask=mask, other=0)
    computed = tl.load(computed_ptr + row, mask=mask, other=0)
    known = tl.load(known_ptr + row, mask=mask, other=0)
    finished = tl.load(finished_ptr + row, mask=mask, other=0)
    generation = tl.load(generation_ptr + row, mask=mask, other=0)
    alive = (num_query > 0) & (finished == 0) & (generation == tenancy)
    most = known - computed
    if drafts_ptr is not None:
        most += tl.load(drafts_ptr + row, mask=mask, other=0)
    query_len = tl.maximum(tl.where(alive, tl.minimum(num_query, most), 0), 0)
    return row, query_len, computed, known


@triton.jit
def store_row(i, mask, query_len, computed, known, query_len_out, computed_out, seq_len_out, samples_out):
    """Write what `planned_row` found; returns seq_len. A dead row has zeros."""
    seq_len = tl.where(query_len > 0, computed + query_len, 0)
    tl.store(query_len_out + i, query_len, mask=mask)
    tl.store(computed_out + i, tl.where(query_len > 0, computed, 0), mask=mask)
    tl.store(seq_len_out + i, seq_len, mask=mask)
    tl.store(samples_out + i, (query_len > 0) & (seq_len >= known), mask=mask)
    return seq_len


@triton.jit
def store_token(token, mask, i, position, valid, token_ids, input_ids_out, positions_out, token_row_out, token_valid_out):
    """Write a token's place and id. token_ids: where its row's tokens begin."""
    token_id = tl.load(token_ids + position, mask=mask & valid, other=0)
    tl.store(input_ids_out + token, token_id.to(tl.int64), mask=mask)
    tl.store(positions_out + token, position.to(tl.int64), mask=mask)
    tl.store(token_row_out + token, i.to(tl.int64), mask=mask)
    tl.store(token_valid_out + token, valid, mask=mask)


@triton.jit
def row_of_token(token, mask, query_start_ptr, N, halvings):
    """The row that each token belongs to, the last one for tokens of nobody: how many rows end no later than it.

    In a step of decode rows token t is row t's, which is tried first.
    """
    row = tl.minimum(token, N - 1)
    start = tl.load(query_start_ptr + row, mask=mask, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=mask, other=0)
    missed = mask & ((token < start) | (token >= end))
    if tl.max(missed.to(tl.int32), 0) > 0:
        row = tl.zeros_like(token)
        last = row + N - 1
        for _ in range(halvings):
            middle = (row + last) // 2
            ended = tl.load(query_start_ptr + middle + 1, mask=mask, other=0) <= token
            row = tl.where(ended & (row < last), middle + 1, row)
            last = tl.where(ended, last, middle)
    return row


@triton.jit
def slot_of(page, position, valid, tokens_per_page):
    slot = page.to(tl.int64) * tokens_per_page + position % tokens_per_page
    return tl.where(valid & (page != NULL_PAGE), slot, SKIP_SLOT)


@triton.jit(do_not_specialize=_ANY_SIZE)
def rows_kernel(
    rows_ptr, num_query_ptr, generations_ptr, computed_ptr, known_ptr, finished_ptr, generation_ptr,
    query_len_out, computed_out, seq_len_out, samples_out, drafts_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    _, query_len, computed, known = planned_row(
        i, mask, rows_ptr, num_query_ptr, generations_ptr, computed_ptr, known_ptr, finished_ptr, generation_ptr, drafts_ptr
    )
    store_row(i, mask, query_len, computed, known, query_len_out, computed_out, seq_len_out, samples_out)


@triton.jit(do_not_specialize=_ANY_SIZE)
def tokens_kernel(
    rows_ptr, query_start_ptr, query_len_ptr, computed_ptr, known_ptr, token_ids_ptr,
    input_ids_out, positions_out, token_row_out, token_valid_out, sample_index_out,
    N, T, L, halvings, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program lays out BLOCK tokens and finds the last known tokens of BLOCK rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    i = row_of_token(token, mask, query_start_ptr, N, halvings)
    offset = token - tl.load(query_start_ptr + i, mask=mask, other=0)
    valid = offset < tl.load(query_len_ptr + i, mask=mask, other=0)
    position = tl.where(valid, tl.load(computed_ptr + i, mask=mask, other=0) + offset, 0)
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    store_token(token, mask, i, position, valid, token_ids_ptr + row * L, input_ids_out, positions_out, token_row_out, token_valid_out)
    in_step = token < N
    start = tl.load(query_start_ptr + token, mask=in_step, other=0)
    length = tl.load(query_len_ptr + token, mask=in_step, other=0)
    planned = tl.load(rows_ptr + token, mask=in_step, other=0).to(tl.int64)
    pending = tl.load(known_ptr + planned, mask=in_step, other=0) - tl.load(computed_ptr + token, mask=in_step, other=0)
    length = tl.minimum(length, pending)
    last = tl.minimum(start + tl.maximum(length - 1, 0), T - 1)
    tl.store(sample_index_out + token, last.to(tl.int64), mask=in_step)


@triton.jit(do_not_specialize=_ANY_SIZE)
def block_table_kernel(table_ptr, rows_ptr, out_ptr, table_stride, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (i, j) copies the j-th BLOCK pages of row i."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, page = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + i).to(tl.int64)
    tl.store(out_ptr + i * P + page, tl.load(table_ptr + row * table_stride + page, mask=page < P), mask=page < P)


@triton.jit(do_not_specialize=_ANY_SIZE)
def slots_kernel(
    table_ptr, token_row_ptr, positions_ptr, valid_ptr, out_ptr, table_stride, tokens_per_page, T, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    i = tl.load(token_row_ptr + token, mask=mask, other=0)
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    valid = tl.load(valid_ptr + token, mask=mask, other=0) != 0
    page = tl.load(table_ptr + i * table_stride + position // tokens_per_page, mask=mask & valid, other=NULL_PAGE)
    tl.store(out_ptr + token, slot_of(page, position, valid, tokens_per_page), mask=mask)


@triton.jit(do_not_specialize=_ANY_SIZE)
def step_kernel(
    rows_ptr, num_query_ptr, generations_ptr, query_start_ptr,
    computed_ptr, known_ptr, finished_ptr, generation_ptr, num_accepted_ptr, token_ids_ptr, table_ptr,
    query_len_out, computed_out, seq_len_out, samples_out, num_accepted_out, sample_index_out,
    input_ids_out, positions_out, token_row_out, token_valid_out, block_table_out, slots_out, drafts_ptr,
    N, T, P, L, table_stride, tokens_per_page, halvings, token_programs,
    BLOCK: tl.constexpr, PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs lay out BLOCK tokens each, the others take a row each. table_ptr None: no block table, no slots.

    Both go back to the columns, so neither waits for the other.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) < token_programs:
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = token < T
        i = row_of_token(token, mask, query_start_ptr, N, halvings)
        row, query_len, computed, _known = planned_row(
            i, mask, rows_ptr, num_query_ptr, generations_ptr, computed_ptr, known_ptr, finished_ptr, generation_ptr, drafts_ptr
        )
        offset = token - tl.load(query_start_ptr + i, mask=mask, other=0)
        valid = offset < query_len
        position = tl.where(valid, computed + offset, 0)
        store_token(token, mask, i, position, valid, token_ids_ptr + row * L, input_ids_out, positions_out, token_row_out, token_valid_out)
        if table_ptr is not None:
            page = tl.load(table_ptr + row * table_stride + position // tokens_per_page, mask=mask & valid, other=NULL_PAGE)
            tl.store(slots_out + token, slot_of(page, position, valid, tokens_per_page), mask=mask)
    else:
        planned = tl.program_id(0) - token_programs
        own_row, own_len, own_computed, own_known = planned_row(
            planned, planned < N,
            rows_ptr, num_query_ptr, generations_ptr, computed_ptr, known_ptr, finished_ptr, generation_ptr, drafts_ptr,
        )  # fmt: skip
        seq_len = store_row(planned, planned < N, own_len, own_computed, own_known, query_len_out, computed_out, seq_len_out, samples_out)
        tl.store(num_accepted_out + planned, tl.load(num_accepted_ptr + own_row))
        last = tl.load(query_start_ptr + planned) + tl.maximum(tl.minimum(own_len, own_known - own_computed) - 1, 0)
        tl.store(sample_index_out + planned, tl.minimum(last, T - 1).to(tl.int64))
        if table_ptr is not None:
            pages = table_ptr + own_row * table_stride
            needed = tl.minimum(tl.maximum(tl.cdiv(seq_len, tokens_per_page), 1), P)
            for first in range(0, needed, PAGES):
                place = first + tl.arange(0, PAGES)
                value = tl.load(pages + place, mask=place < needed)
                tl.store(block_table_out + planned.to(tl.int64) * P + place, value, mask=place < needed)
