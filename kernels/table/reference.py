"""Request-table operations in plain torch: staged edits, the state update that ends a step, and the record it leaves.

Dimension letters: R table rows (the last one is scratch), N rows of the step, k draft tokens, L longest sequence, E ring entries.
"""

from __future__ import annotations

import torch

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = range(4)  # values of modelrunner.batch.Finish
RECORD_HEADER = 5  # words before a record's tokens: row, generation, number of tokens, finish code, number of drafts
NO_TOKEN = -1


def apply_patch(arena: torch.Tensor, dst: torch.Tensor, length: torch.Tensor, start: torch.Tensor, words: torch.Tensor) -> None:
    """Write runs of words into the table, in place: run i puts the `length[i]` words from `words[start[i]]` on at word `dst[i]`.

    arena: [W] int32. dst: [S] int64. length: [S] int32, summing to n. start: [S] int32, the sum of the lengths before. words: [n] int32.
    Runs do not overlap.
    """
    n = words.numel()
    if n == 0:
        return
    place = torch.repeat_interleave(dst - start, length, output_size=n)
    arena.index_copy_(0, place + torch.arange(n, device=arena.device), words)


def update_state(
    rows: torch.Tensor,
    query_len: torch.Tensor,
    samples: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    ok: torch.Tensor,
    token_ids: torch.Tensor,
    computed: torch.Tensor,
    known: torch.Tensor,
    finished: torch.Tensor,
    limit: torch.Tensor,
    num_accepted: torch.Tensor,
    stop_seat: torch.Tensor,
    stop_ids: torch.Tensor,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append what the step sampled and decide who is finished. Changes the columns and `num_tokens` in place.

    rows [N] int32. query_len [N] int32: 0 marks a dead row, which changes nothing. samples, ok [N] bool. tokens [N, 1+k] int64.
    num_tokens [N] int32: in, sampled tokens; out, those that count (0 unless the row samples and is ok; cut after a stop id and at the
    limit).
    Columns: token_ids [R, L]; computed, known, finished, limit, num_accepted [R] int32; stop_seat [R] int32, -1 for none;
    stop_ids [seats+1, width] int32 filled up with -1. ends: [N] int32, after how many of its tokens a row's output is complete, 0 if none
    does that (see `walk_tokens`); it ends there as with a stop id. None: no row's is.
    computed grows by the query tokens that count (all of them, less rejected drafts), which num_accepted reports; known by num_tokens.
    Returns finish [N] int32: STOP if the last token that counts ends the output, else LENGTH if known reached limit; ERROR if not ok.
    """
    row = rows.long()
    alive = query_len > 0
    sampling = samples & alive
    known_old, computed_old, limit_row = known[row], computed[row], limit[row]
    step = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)

    room = torch.where(sampling & ok, torch.minimum(num_tokens, limit_row - known_old), 0).clamp_(min=0)
    seat = stop_seat[row].long()
    stops = (tokens.unsqueeze(-1) == stop_ids[seat].unsqueeze(1)).any(-1) & (seat >= 0).unsqueeze(-1)
    if ends is not None:
        stops |= step + 1 == ends.unsqueeze(-1)
    stops &= step < room.unsqueeze(-1)
    first_stop = torch.where(stops, step, tokens.shape[1]).amin(-1)
    num_tokens.copy_(torch.minimum(room, first_stop + 1))

    known_new = known_old + num_tokens
    # The newest token is never in the cache: after sampling, all but it are computed. A chunk that does not sample counts whole.
    computed_new = torch.where(num_tokens > 0, known_new - 1, computed_old + query_len)
    finish = torch.where(known_new >= limit_row, FINISH_LENGTH, FINISH_NONE)
    finish = torch.where(stops.any(-1), FINISH_STOP, finish)
    finish = torch.where(ok, finish, FINISH_ERROR)
    finish = torch.where(sampling, finish, FINISH_NONE).to(torch.int32)

    # Rows and places that must not change get their old value back: no mask, no data-dependent shape. An unused place is the one of
    # the last known token, which no valid token is written to, so that no two writes of different values meet.
    counts = step < num_tokens.unsqueeze(-1)
    place = torch.where(counts, known_old.unsqueeze(-1) + step, (known_old - 1).clamp(min=0).unsqueeze(-1)).long()
    row_2d = row.unsqueeze(-1).expand_as(place)
    token_ids[row_2d, place] = torch.where(counts, tokens.to(token_ids.dtype), token_ids[row_2d, place])
    known[row] = known_new  # num_tokens is 0 in dead rows
    computed[row] = torch.where(alive, computed_new, computed_old)
    num_accepted[row] = torch.where(alive, computed_new - computed_old, num_accepted[row])
    finished[row] = torch.where(sampling, finish, finished[row])
    return finish


def write_record(
    ring: torch.Tensor,
    counter: torch.Tensor,
    rows: torch.Tensor,
    generations: torch.Tensor,
    num_tokens: torch.Tensor,
    finish: torch.Tensor,
    tokens: torch.Tensor,
    num_drafted: torch.Tensor | None = None,
) -> None:
    """Write one record per row into ring entry `counter % E` and advance the counter, both in place.

    ring: [E, Nmax, words] int32, words >= 6 + k. counter: [1] int64. rows, generations, num_tokens, finish: [N] int32. tokens: [N, 1+k]
    int64; those past num_tokens are recorded as -1. num_drafted: [N] int32, drafts of the row that the step checked; None for none.
    """
    n, width = tokens.shape
    header = torch.stack((rows, generations, num_tokens, finish, torch.zeros_like(rows) if num_drafted is None else num_drafted), 1)
    counts = torch.arange(width, device=tokens.device, dtype=torch.int32) < num_tokens.unsqueeze(-1)
    record = torch.cat((header, torch.where(counts, tokens, NO_TOKEN).to(torch.int32)), 1)
    ring[:, :n, : RECORD_HEADER + width].index_copy_(0, counter % ring.shape[0], record.unsqueeze(0))
    counter.add_(1)
