"""Editing logits, in plain torch.

N rows of the step, R rows of the request table, V vocabulary size, L longest request. A seated column comes as two tensors: `seats` [R]
int32, the line of each row or -1, and its lines; the last line always holds defaults, so that -1 indexes it.

A count word says of one token of the vocabulary what the request's tokens say of it: bit 0, whether the prompt has it; the other bits, how
often the output has it.
"""

from __future__ import annotations

import torch

BITS = 32  # tokens in a word of an allow list
PROMPT_BIT, OUTPUT_UNIT = 1, 2  # of a count word
NOTHING = -2  # neither an id nor a place without one


def count_tokens(
    rows: torch.Tensor,
    samples: torch.Tensor,
    seats: torch.Tensor,
    counted: torch.Tensor,
    prompt_len: torch.Tensor,
    known: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Bring the counts of the rows that sample up to their known tokens.

    rows: [N] int32. samples: [N] bool. counted: [R] int32, tokens counted so far, changed; 0 clears the row's line first, whoever had it.
    prompt_len, known: [R] int32. token_ids: [R, L] int32, of which the first `known` are read. counts: [S + 1, V] int32 count words,
    changed. A row without a seat, or one that does not sample, changes nothing.
    """
    row = rows.long()
    seat, done, upto = seats[row], counted[row], known[row]
    active = samples & (seat >= 0)
    line = torch.where(active, seat, counts.shape[0] - 1).long()  # the others write the line of defaults, with itself
    words = torch.where((active & (done == 0)).unsqueeze(1), 0, counts[line])
    place = torch.arange(token_ids.shape[1], device=rows.device)
    new = active.unsqueeze(1) & (place >= done.unsqueeze(1)) & (place < upto.unsqueeze(1))
    ids = torch.where(new, token_ids[row], 0).long()
    prompt = place < prompt_len[row].unsqueeze(1)
    words.scatter_add_(1, ids, torch.where(new & ~prompt, OUTPUT_UNIT, 0).to(words.dtype))
    seen = torch.zeros_like(words).scatter_reduce_(1, ids, torch.where(new & prompt, PROMPT_BIT, 0).to(words.dtype), "amax")
    counts.index_copy_(0, line, words | seen)
    counted.index_copy_(0, row, torch.where(active, upto, done))


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    known: torch.Tensor,
    prompt_len: torch.Tensor,
    token_ids: torch.Tensor,
    allowed: tuple[torch.Tensor, torch.Tensor] | None,
    bias: tuple[torch.Tensor, torch.Tensor] | None,
    stops: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    bad_words: tuple[torch.Tensor, torch.Tensor] | None,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    automata: tuple[torch.Tensor, torch.Tensor] | None = None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """A copy of the logits with each row's masks, bias, bans and penalties applied, in this order. None: no row has any.

    Float32, but in the logits' own type where masks are all that there is, since they change no number.
    logits: [N, V]. rows: [N] int32. known, prompt_len: [R] int32. token_ids: [R, L] int32. ahead: [N] int32, how many tokens behind the
    row's known ones, drafts, are taken for known in this line; None: nowhere any. A row may then have several lines.
    allowed: seats, [S + 1, ceil(V / 32)] int32 bitmasks; bit v % 32 of word v // 32 allows token v, others become -inf.
    automata: the same again, with states in place of seats (see `modelrunner.kernels.automata`).
    bias: seats, [S + 1, 2 B] int32: B different ids, -1 for none, then the bits of B float32 numbers to add.
    stops: seats, [S + 1, K] int32 ids (-1 for none), min_total [R] int32: a row of fewer known tokens may not sample these ids.
    bad_words: seats, [S + 1, M, T] int32: M sequences of up to T ids, each at the end of its T places, -1 before it and for none: when the
    output ends with all but the last id of a sequence, that last id is banned.
    penalties: seats, [S + 1, V] int32 count words, then repetition, presence, frequency [R] float32. Logits of tokens in prompt or output
    are divided by `repetition` if positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858, section 4.1); then `presence` is taken
    off once for tokens of the output and `frequency` as often as they occur.
    """
    row = rows.long()
    upto = known[row] if ahead is None else known[row] + ahead
    only_allowed = bias is None and stops is None and bad_words is None and penalties is None
    x = logits.to(logits.dtype if only_allowed else torch.float32, copy=True)
    mask_logits(x, rows, allowed, automata)
    if bias is not None:
        ids, values = bias[1][bias[0][row].long()].chunk(2, 1)
        x.scatter_add_(1, ids.clamp(min=0).long(), torch.where(ids >= 0, values.contiguous().view(torch.float32), 0.0))
    if stops is not None:
        ids = stops[1][stops[0][row].long()]
        _ban(x, ids, (ids >= 0) & (upto < stops[2][row]).unsqueeze(1))
    if bad_words is not None:
        _ban(x, *_completed(bad_words[1][bad_words[0][row].long()], row, upto, prompt_len, token_ids))
    if penalties is not None:
        seats, counts, repetition, presence, frequency = penalties
        words = counts[seats[row].long()]
        if ahead is not None:
            words = _with_drafts(words, row, known, torch.where(seats[row] >= 0, ahead, 0), token_ids)
        factor, times = repetition[row].unsqueeze(1), (words >> 1).float()
        x = torch.where(words != 0, torch.where(x > 0, x / factor, x * factor), x)
        x = x - frequency[row].unsqueeze(1) * times - presence[row].unsqueeze(1) * (times > 0)
    return x


def _with_drafts(words: torch.Tensor, row: torch.Tensor, known: torch.Tensor, ahead: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Count words [N, V] with the drafts ahead as tokens of the output. row: [N] int64."""
    place = torch.arange(token_ids.shape[1], device=row.device)
    first = known[row].unsqueeze(1)
    drafted = (place >= first) & (place < first + ahead.unsqueeze(1))
    ids = torch.where(drafted, token_ids[row], 0).long()
    return words.scatter_add(1, ids.clamp(0, words.shape[1] - 1), torch.where(drafted, OUTPUT_UNIT, 0).to(words.dtype))


def mask_logits(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    allowed: tuple[torch.Tensor, torch.Tensor] | None,
    automata: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Apply the masks of `edit_logits` to the logits [N, V] themselves; rows without one are not touched.

    rows: None where seats and states are [N], of the lines themselves.
    """
    row, vocab = slice(None) if rows is None else rows.long(), logits.shape[1]
    for masks in (allowed, automata):
        if masks is not None:
            seat = masks[0][row]
            bits = masks[1][seat.long()].unsqueeze(2) >> torch.arange(BITS, device=logits.device, dtype=torch.int32)
            logits.masked_fill_((seat >= 0).unsqueeze(1) & ~(bits & 1).bool().flatten(1)[:, :vocab], -torch.inf)


def _ban(x: torch.Tensor, ids: torch.Tensor, banned: torch.Tensor) -> None:
    """Make logits -inf. ids, banned: [N, K]; an id that is not banned may be anything."""
    limit = torch.where(banned, -torch.inf, torch.inf)
    x.scatter_reduce_(1, torch.where(banned, ids, 0).long(), limit, "amin")


def _completed(
    sequences: torch.Tensor, row: torch.Tensor, upto: torch.Tensor, prompt_len: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last ids of all sequences, and whether the output ends with the ids before it: [M, W] each, of M lines with W sequences [M, W, T].

    upto: [M], how many tokens a line's row has.
    """
    before = sequences.shape[2] - 1
    place = upto.unsqueeze(1) - torch.arange(before, 0, -1, device=row.device)
    written = place >= prompt_len[row].unsqueeze(1)
    ids = torch.where(written, token_ids[row].gather(1, place.clamp(0, token_ids.shape[1] - 1).long()), NOTHING)
    same = (sequences[:, :, :before] == ids.unsqueeze(1)) | (sequences[:, :, :before] < 0)
    return sequences[:, :, before], same.all(2) & (sequences[:, :, before] >= 0)
