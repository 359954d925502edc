"""Drafts on their way into a step and out of it: small kernels over rows, each one launch.

Letters: N rows and T tokens of the step, K drafts of a row, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.speculation import reference

BLOCK = 128  # rows, tokens or lines of a program
NULL_PAGE = tl.constexpr(reference.NULL_PAGE)
SKIP_SLOT = tl.constexpr(reference.SKIP_SLOT)
# Every step has its own sizes; a kernel that were built for some of them would be built again while requests wait.
_ANY_SIZE = ["N", "T", "most", "num_draft", "index"]


@triton.jit(do_not_specialize=_ANY_SIZE)
def spread_kernel(
    rows_ptr, query_len_ptr, samples_ptr, computed_ptr, known_ptr,
    rows_out, samples_out, computed_out, query_len_out, ahead_out, count_out,
    N, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK lines a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = line < N * SLOTS
    i, ahead = line // SLOTS, line % SLOTS
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    computed = tl.load(computed_ptr + i, mask=mask, other=0)
    samples = tl.load(samples_ptr + i, mask=mask, other=0) != 0
    pending = tl.load(known_ptr + row.to(tl.int64), mask=mask, other=0) - computed
    count = tl.where(samples, tl.load(query_len_ptr + i, mask=mask, other=0) - pending, 0)
    tl.store(rows_out + line, row, mask=mask)
    tl.store(samples_out + line, samples & (ahead <= count), mask=mask)
    tl.store(computed_out + line, computed, mask=mask)
    tl.store(query_len_out + line, pending + ahead, mask=mask)
    tl.store(ahead_out + line, ahead, mask=mask)
    tl.store(count_out + i, count, mask=mask & (ahead == 0))


def spread_rows(
    rows: torch.Tensor,
    query_len: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    slots: int,
    *out: torch.Tensor,
) -> None:
    """See the reference."""
    n = rows.shape[0]
    spread_kernel[(triton.cdiv(n * slots, BLOCK),)](rows, query_len, samples, computed, known, *out, n, slots, BLOCK, **pdl(rows))


@triton.jit(do_not_specialize=_ANY_SIZE)
def store_kernel(
    rows_ptr, query_len_ptr, wants_ptr, drafts_ptr, known_ptr, limit_ptr, token_ids_ptr, num_drafts_ptr,
    N, K, vocab, L, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, WIDTH)[None, :]
    live = i < N
    live = live & (tl.load(query_len_ptr + i, mask=live, other=0) > 0)
    wants = live & (tl.load(wants_ptr + i, mask=live, other=0) != 0)
    row = tl.load(rows_ptr + i, mask=live, other=0).to(tl.int64)
    known = tl.load(known_ptr + row, mask=live, other=0)
    limit = tl.load(limit_ptr + row, mask=live, other=0)
    draft = tl.load(drafts_ptr + i[:, None].to(tl.int64) * K + step, mask=wants[:, None] & (step < K), other=-1)
    good = (draft >= 0) & (draft < vocab) & (known[:, None] + step < limit[:, None] - 1)
    count = tl.min(tl.where(good, WIDTH, step), 1)
    tl.store(token_ids_ptr + row[:, None] * L + known[:, None] + step, draft, mask=step < count[:, None])
    tl.store(num_drafts_ptr + row, count, mask=live)


def store_drafts(
    rows: torch.Tensor,
    query_len: torch.Tensor,
    wants: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
    known: torch.Tensor,
    limit: torch.Tensor,
    token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
) -> None:
    """See the reference."""
    n, k = drafts.shape
    drafts = drafts.contiguous()
    store_kernel[(triton.cdiv(n, BLOCK),)](
        rows, query_len, wants, drafts, known, limit, token_ids, num_drafts,
        n, k, vocab_size, token_ids.stride(0), triton.next_power_of_2(max(k, 1)), BLOCK, **pdl(rows),
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_SIZE)
def inputs_kernel(
    rows_ptr, query_start_ptr, query_len_ptr, samples_ptr, computed_ptr, token_row_ptr, positions_ptr, valid_ptr,
    known_ptr, finished_ptr, token_ids_ptr,
    wants_out, known_out, newest_out, last_place_out, next_ids_out, positions_out,
    N, T, num_draft, most, L, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens and BLOCK rows a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    owner = tl.load(rows_ptr + tl.load(token_row_ptr + token, mask=mask, other=0), mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    valid = mask & (tl.load(valid_ptr + token, mask=mask, other=0) != 0)
    there = valid & (position + 1 < tl.load(known_ptr + owner, mask=mask, other=0))
    following = tl.load(token_ids_ptr + owner * L + position + 1, mask=there, other=0)
    tl.store(next_ids_out + token, following.to(tl.int64), mask=mask)
    tl.store(positions_out + token, tl.minimum(position, most - 1), mask=mask)

    in_step = token < N
    row = tl.load(rows_ptr + token, mask=in_step, other=0).to(tl.int64)
    known = tl.load(known_ptr + row, mask=in_step, other=0)
    query_len = tl.load(query_len_ptr + token, mask=in_step, other=0)
    computed = tl.load(computed_ptr + token, mask=in_step, other=0)
    finished = tl.load(finished_ptr + row, mask=in_step, other=1)
    samples = tl.load(samples_ptr + token, mask=in_step, other=0) != 0
    wants = samples & (query_len > 0) & (finished == 0) & (known + num_draft <= most)
    newest = tl.load(token_ids_ptr + row * L + known - 1, mask=wants, other=0)
    offset = tl.maximum(tl.minimum(query_len, known - 1 - computed) - 1, 0)
    place = tl.minimum(tl.load(query_start_ptr + token, mask=in_step, other=0) + offset, T - 1)
    tl.store(wants_out + token, wants, mask=in_step)
    tl.store(known_out + token, known, mask=in_step)
    tl.store(newest_out + token, newest.to(tl.int64), mask=in_step)
    tl.store(last_place_out + token, place.to(tl.int64), mask=in_step)


def draft_inputs(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    token_row: torch.Tensor,
    positions: torch.Tensor,
    token_valid: torch.Tensor,
    known: torch.Tensor,
    finished: torch.Tensor,
    token_ids: torch.Tensor,
    num_draft: int,
    most: int,
    *out: torch.Tensor,
) -> None:
    """See the reference."""
    n, t = rows.shape[0], positions.shape[0]
    inputs_kernel[(triton.cdiv(max(n, t), BLOCK),)](
        rows, query_start, query_len, samples, computed, token_row, positions, token_valid, known, finished, token_ids,
        *out, n, t, num_draft, most, token_ids.stride(0), BLOCK, **pdl(rows),
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_ANY_SIZE, "P", "table_stride"])
def pass_kernel(
    rows_ptr, wants_ptr, known_ptr, limit_ptr, table_ptr,
    query_len_out, computed_out, seq_len_out, positions_out, valid_out, slots_out,
    N, index, P, table_stride, tokens_per_page, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program. table_ptr None: no cache group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    row = tl.load(rows_ptr + i, mask=mask, other=0).to(tl.int64)
    position = tl.maximum(tl.load(known_ptr + i, mask=mask, other=0) - 1 + index, 0)
    valid = mask & (tl.load(wants_ptr + i, mask=mask, other=0) != 0)
    valid = valid & (position < tl.load(limit_ptr + row, mask=mask, other=0) - 1)
    if table_ptr is not None:
        place = tl.minimum(position // tokens_per_page, P - 1)
        page = tl.load(table_ptr + i.to(tl.int64) * table_stride + place, mask=valid, other=NULL_PAGE)
        valid = valid & (page != NULL_PAGE)
        slot = page.to(tl.int64) * tokens_per_page + position % tokens_per_page
        tl.store(slots_out + i, tl.where(valid, slot, SKIP_SLOT), mask=mask)
    tl.store(query_len_out + i, valid.to(tl.int32), mask=mask)
    tl.store(computed_out + i, tl.where(valid, position, 0), mask=mask)
    tl.store(seq_len_out + i, tl.where(valid, position + 1, 0), mask=mask)
    tl.store(positions_out + i, tl.where(valid, position, 0).to(tl.int64), mask=mask)
    tl.store(valid_out + i, valid, mask=mask)


def draft_pass(
    rows: torch.Tensor,
    wants: torch.Tensor,
    known: torch.Tensor,
    limit: torch.Tensor,
    index: int,
    groups: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
    *out: torch.Tensor,
) -> None:
    """See the reference; one launch for a drafter with one cache group, or none."""
    if len(groups) > 1:
        return reference.draft_pass(rows, wants, known, limit, index, groups, *out)
    n = rows.shape[0]
    table, size, slots = groups[0] if groups else (None, 1, None)
    pages, stride = (1, 1) if table is None else (table.shape[1], table.stride(0))
    pass_kernel[(triton.cdiv(n, BLOCK),)](rows, wants, known, limit, table, *out, slots, n, index, pages, stride, size, BLOCK, **pdl(rows))
