"""From the request table to a step's batch, in plain torch. Outputs go into the `*_out` buffers, whose addresses never change.

Dimension letters: R table rows, N rows and T tokens of the step (padding included), L longest sequence, P pages of a block table.
"""

from __future__ import annotations

import torch

NULL_PAGE = 0
SKIP_SLOT = -1


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
    """Decide per planned row what it really does in this step.

    rows, num_query, generations: [N] int32, the plan. computed, known, finished, generation, num_drafts: [R] int32 columns.
    A row is alive if it was planned, has not finished, and still belongs to the planned tenancy. query_len = its planned query
    tokens, but no more than are known and not computed, and the drafts behind them (num_drafts; None: there are none). samples: the step
    computes the row's last known token. Dead rows: all 0.
    query_len_out, computed_out, seq_len_out: [N] int32. samples_out: [N] bool.
    """
    row = rows.long()
    alive = (num_query > 0) & (finished[row] == 0) & (generation[row] == generations)
    done, total = computed[row], known[row]
    most = total - done if num_drafts is None else total - done + num_drafts[row]
    query_len = torch.where(alive, torch.minimum(num_query, most), 0).clamp_(min=0)
    alive = query_len > 0
    end = done + query_len
    query_len_out.copy_(query_len)
    computed_out.copy_(done * alive)
    seq_len_out.copy_(end * alive)
    samples_out.copy_(alive & (end >= total))


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
    """Lay the step's query tokens out.

    rows, query_len, computed: [N] int32. query_start: [N+1] int32, ascending; tokens from query_start[N] on belong to nobody.
    known: [R] int32, token_ids: [R, L] int32 columns; behind a row's known tokens lie its drafts. Token t of row i is valid if
    t - query_start[i] < query_len[i]; an invalid one has id 0 and position 0.
    input_ids_out, positions_out, token_row_out: [T] int64. token_valid_out: [T] bool.
    sample_index_out: [N] int64, each row's last valid token that is not a draft (some token of the step for a dead row).
    """
    n, num_tokens = rows.shape[0], input_ids_out.shape[0]
    token = torch.arange(num_tokens, device=rows.device, dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True).clamp_(max=n - 1)
    offset = token - query_start[row]
    valid = offset < query_len[row]
    positions = torch.where(valid, computed[row] + offset, 0)
    token_row_out.copy_(row)
    token_valid_out.copy_(valid)
    positions_out.copy_(positions)
    input_ids_out.copy_(token_ids[rows[row].long(), positions.long()] * valid)
    last = torch.minimum(query_len, known[rows.long()] - computed) - 1
    sample_index_out.copy_((query_start[:-1] + last.clamp_(min=0)).clamp_(max=num_tokens - 1))


def gather_block_table(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows' first pages. table: [R, Pmax] int32. rows: [N] int32. out: [N, P] int32, P <= Pmax."""
    out.copy_(table[:, : out.shape[1]].index_select(0, rows))


def slot_mapping(
    block_table: torch.Tensor,
    token_row: torch.Tensor,
    positions: torch.Tensor,
    token_valid: torch.Tensor,
    tokens_per_page: int,
    out: torch.Tensor,
) -> None:
    """Where each token's keys and values go: page * tokens_per_page + place in the page; -1 for an invalid token or the null page.

    block_table: [N, P] int32. token_row, positions: [T] int64. token_valid: [T] bool. out: [T] int64.
    """
    page = block_table[token_row, positions // tokens_per_page]
    slot = page.long() * tokens_per_page + positions % tokens_per_page
    out.copy_(torch.where(token_valid & (page != NULL_PAGE), slot, SKIP_SLOT))
