"""What speculative decoding does beside the target's step, in plain torch.

Dimension letters: R table rows, N rows and T tokens of the step (padding included), k drafts, L longest sequence, P pages of a block table.
Drafts of a row lie behind its known tokens: draft j in `token_ids[row, known + j]`; the column num_drafts says how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NULL_PAGE = 0
SKIP_SLOT = -1


def spread_rows(
    rows: torch.Tensor,
    query_len: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    slots: int,
    rows_out: torch.Tensor,
    samples_out: torch.Tensor,
    computed_out: torch.Tensor,
    query_len_out: torch.Tensor,
    ahead_out: torch.Tensor,
    count_out: torch.Tensor,
) -> None:
    """The lines of logits of a step with drafts: `slots` (1 + k) of each row, of its last known token and of the drafts behind it.

    rows, query_len, computed: [N] int32 and samples [N] bool, of the step. known: [R] int32 column, from before its results. Line
    i * slots + j is of row i and has j drafts ahead of what is known.
    rows_out [N * slots] int32. samples_out [N * slots] bool: False where the row has no such draft in the step. computed_out,
    query_len_out [N * slots] int32: their sum is the position of the token to be chosen. ahead_out [N * slots] int32: j. count_out [N]
    int32: drafts that each row has in the step.
    """
    pending = known[rows.long()] - computed
    ahead = torch.arange(slots, device=rows.device, dtype=torch.int32).expand(rows.shape[0], slots)
    count = torch.where(samples, query_len - pending, 0)
    count_out.copy_(count)
    live = samples.unsqueeze(1) & (ahead <= count.unsqueeze(1))
    lines = (rows.unsqueeze(1), live, computed.unsqueeze(1), pending.unsqueeze(1) + ahead, ahead)
    for out, line in zip((rows_out, samples_out, computed_out, query_len_out, ahead_out), lines, strict=True):
        out.view(-1, slots).copy_(line)


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
    """Put proposed tokens behind the known ones, in place, for the next step to check.

    rows, query_len: [N] int32; a row of query_len 0 changes nothing. wants: [N] bool; other rows get none. drafts: [N, k] int32; the first
    id outside 0..vocab_size-1 ends a row's drafts. known, limit, num_drafts: [R] int32, token_ids: [R, L] int32 columns. A row that may
    know `limit` tokens has no use for drafts from place limit - 1 on.
    """
    row, k = rows.long(), drafts.shape[1]
    first = known[row].unsqueeze(1)
    step = torch.arange(k, device=rows.device, dtype=torch.int32)
    good = wants.unsqueeze(1) & (drafts >= 0) & (drafts < vocab_size) & (first + step < limit[row].unsqueeze(1) - 1)
    good = good.cummin(1).values if k else good
    live = query_len > 0
    good = good & live.unsqueeze(1)
    # An unused place gets the last known token back, so that no two writes of different values meet.
    place = torch.where(good, first + step, (first - 1).clamp(min=0)).long()
    row_2d = row.unsqueeze(1).expand_as(place)
    token_ids[row_2d, place] = torch.where(good, drafts, token_ids[row_2d, place])
    num_drafts[row] = torch.where(live, good.sum(1, dtype=torch.int32), num_drafts[row])


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
    wants_out: torch.Tensor,
    known_out: torch.Tensor,
    newest_out: torch.Tensor,
    last_place_out: torch.Tensor,
    next_ids_out: torch.Tensor,
    positions_out: torch.Tensor,
) -> None:
    """What a drafter is told of a step that has ended (see `modelrunner.speculation.DraftStep`).

    rows, query_len, computed: [N] int32, query_start: [N+1] int32, samples: [N] bool, token_row, positions: [T] int64, token_valid: [T]
    bool, of the step. known, finished: [R] int32, token_ids: [R, L] int32 columns, with its results. most: positions that the drafter
    holds; a row whose num_draft drafts would pass them wants none.
    wants_out: [N] bool. known_out: [N] int32. newest_out, last_place_out: [N] int64. next_ids_out, positions_out: [T] int64.
    """
    row, num_tokens = rows.long(), positions.shape[0]
    total = known[row]
    wants = samples & (query_len > 0) & (finished[row] == 0) & (total + num_draft <= most)
    wants_out.copy_(wants)
    known_out.copy_(total)
    newest = token_ids[row, (total - 1).clamp(min=0).long()]
    newest_out.copy_(torch.where(wants, newest, 0))
    offset = (torch.minimum(query_len, total - 1 - computed) - 1).clamp(min=0)
    last_place_out.copy_((query_start[:-1] + offset).clamp(max=num_tokens - 1))
    owner, follows = row[token_row], positions + 1
    there = token_valid & (follows < known[owner])
    ids = token_ids[owner, follows.clamp(max=token_ids.shape[1] - 1)]
    next_ids_out.copy_(torch.where(there, ids, 0))
    positions_out.copy_(positions.clamp(max=most - 1))


def draft_pass(
    rows: torch.Tensor,
    wants: torch.Tensor,
    known: torch.Tensor,
    limit: torch.Tensor,
    index: int,
    groups: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
    query_len_out: torch.Tensor,
    computed_out: torch.Tensor,
    seq_len_out: torch.Tensor,
    positions_out: torch.Tensor,
    valid_out: torch.Tensor,
) -> None:
    """Lengths, positions and slots of a pass over one token a row, the one at position known - 1 + index.

    rows, known: [N] int32 and wants [N] bool. limit: [R] int32 column. groups: (block table [N, P] int32, tokens per page, slots out [N]
    int64) of each cache group. A row takes part if it wants to, the position is below limit - 1 and each group has a page for it; the
    others have zeros, and slots of -1. query_len_out, computed_out, seq_len_out: [N] int32. positions_out: [N] int64. valid_out: [N] bool.
    """
    position = (known - 1 + index).clamp(min=0).long()
    valid = wants & (position < limit[rows.long()] - 1)
    places = []
    for table, tokens_per_page, _ in groups:
        at = (position // tokens_per_page).clamp(max=table.shape[1] - 1)
        page = table.gather(1, at.unsqueeze(1)).squeeze(1)
        valid = valid & (page != NULL_PAGE)
        places.append(page.long() * tokens_per_page + position % tokens_per_page)
    for (_, _, slots), place in zip(groups, places, strict=True):
        slots.copy_(torch.where(valid, place, SKIP_SLOT))
    query_len_out.copy_(valid)
    computed_out.copy_(position * valid)
    seq_len_out.copy_((position + 1) * valid)
    positions_out.copy_(position * valid)
    valid_out.copy_(valid)


def ngram_draft(
    rows: torch.Tensor,
    wants: torch.Tensor,
    known: torch.Tensor,
    token_ids: torch.Tensor,
    longest: int,
    min_size: int,
    max_size: int,
    out: torch.Tensor,
) -> None:
    """Propose what followed the last time that the row's text ended as it does now (prompt lookup; Saxena 2023, Yang et al. 2023,
    arXiv:2304.04487).

    rows, known: [N] int32 and wants [N] bool. token_ids: [R, L] int32 column. longest: no row knows more tokens. Of all earlier places the
    one is taken before which most of the row's last max_size tokens stand, but no fewer than min_size; among equals the last one.
    A copy that reaches the row's end goes on from its own start, as repeated text does. out: [N, k] int32; rows without such a place, or
    that do not want any, are left.
    """
    text = token_ids[rows.long(), :longest]
    end = (known - 1).clamp(0, longest - 1).unsqueeze(1).long()  # of the row's text; rows that are left may be longer
    place = torch.arange(text.shape[1], device=rows.device).unsqueeze(0)  # where an earlier text may end
    length = torch.zeros(text.shape, dtype=torch.int64, device=rows.device)
    same = place < end
    for back in range(max_size):
        wanted = text.gather(1, (end - back).clamp(min=0))
        earlier = torch.roll(text, back, 1)
        same = same & (earlier == wanted) & (place >= back)
        length += same
    score = torch.where(length >= min_size, length * text.shape[1] + place, -1)
    best, at = score.max(1, keepdim=True)
    step = torch.arange(out.shape[1], device=rows.device).unsqueeze(0)
    source = at + 1 + step % (end - at).clamp(min=1)
    found = wants.unsqueeze(1) & (best >= 0)
    out.copy_(torch.where(found, text.gather(1, source.clamp(max=text.shape[1] - 1)), out))
