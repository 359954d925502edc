"""Launchers of the gathers; arguments and results are the references'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from modelrunner.kernels.batch.gather import block_table_kernel, rows_kernel, slots_kernel, step_kernel, tokens_kernel
from modelrunner.kernels.pdl import pdl

BLOCK = 128  # rows, tokens
PAGES = 1024  # of a program, at a time


def gather_rows(
    rows: torch.Tensor,
    num_query: torch.Tensor,
    generations: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    finished: torch.Tensor,
    generation: torch.Tensor,
    query_len_out: torch.Tensor,
    computed_out: torch.Tensor,
    seq_len_out: torch.Tensor,
    samples_out: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> None:
    n = rows.shape[0]
    rows_kernel[(triton.cdiv(n, BLOCK),)](
        rows, num_query, generations, computed, known, finished, generation, query_len_out, computed_out, seq_len_out, samples_out,
        num_drafts, n, BLOCK, **pdl(rows),
    )  # fmt: skip


def gather_tokens(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    token_ids: torch.Tensor,
    input_ids_out: torch.Tensor,
    positions_out: torch.Tensor,
    token_row_out: torch.Tensor,
    token_valid_out: torch.Tensor,
    sample_index_out: torch.Tensor,
) -> None:
    n, t = rows.shape[0], input_ids_out.shape[0]
    tokens_kernel[(triton.cdiv(max(n, t), BLOCK),)](
        rows, query_start, query_len, computed, known, token_ids,
        input_ids_out, positions_out, token_row_out, token_valid_out, sample_index_out,
        n, t, token_ids.stride(0), (n - 1).bit_length(), BLOCK, **pdl(rows),
    )  # fmt: skip


def gather_block_table(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    n, pages = out.shape
    block_table_kernel[(n, triton.cdiv(pages, PAGES))](table, rows, out, table.stride(0), pages, PAGES, **pdl(rows))


def slot_mapping(
    block_table: torch.Tensor,
    token_row: torch.Tensor,
    positions: torch.Tensor,
    token_valid: torch.Tensor,
    tokens_per_page: int,
    out: torch.Tensor,
) -> None:
    t = out.shape[0]
    slots_kernel[(triton.cdiv(t, BLOCK),)](
        block_table, token_row, positions, token_valid, out, block_table.stride(0), tokens_per_page, t, BLOCK, **pdl(out)
    )


def gather_step(
    rows: torch.Tensor,
    num_query: torch.Tensor,
    generations: torch.Tensor,
    query_start: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    finished: torch.Tensor,
    generation: torch.Tensor,
    num_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    query_len_out: torch.Tensor,
    computed_out: torch.Tensor,
    seq_len_out: torch.Tensor,
    samples_out: torch.Tensor,
    num_accepted_out: torch.Tensor,
    sample_index_out: torch.Tensor,
    input_ids_out: torch.Tensor,
    positions_out: torch.Tensor,
    token_row_out: torch.Tensor,
    token_valid_out: torch.Tensor,
    groups: Sequence[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]],
    num_drafts: torch.Tensor | None = None,
) -> None:
    """`gather_rows`, `gather_tokens` and, for each cache group, `gather_block_table` and `slot_mapping`: a launch for each group.

    groups: (pages [R, Pmax], tokens per page, block table out [N, P], slots out [T]). Of a block table only the pages that hold a row's
    first seq_len tokens are copied, and always the first one; the rest of the row keeps what it held. Every launch writes all outputs.
    """
    n, t = rows.shape[0], input_ids_out.shape[0]
    programs = triton.cdiv(t, BLOCK)
    no_groups: tuple[Any, int, Any, Any] = (None, 1, None, None)
    for table, tokens_per_page, block_table, slots in groups or (no_groups,):
        pages, stride = (0, 0) if table is None else (block_table.shape[1], table.stride(0))
        step_kernel[(programs + n,)](
            rows, num_query, generations, query_start,
            computed, known, finished, generation, num_accepted, token_ids, table,
            query_len_out, computed_out, seq_len_out, samples_out, num_accepted_out, sample_index_out,
            input_ids_out, positions_out, token_row_out, token_valid_out, block_table, slots, num_drafts,
            n, t, pages, token_ids.stride(0), stride, tokens_per_page, (n - 1).bit_length(), programs,
            BLOCK, PAGES, **pdl(rows),
        )  # fmt: skip
