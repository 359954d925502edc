"""Editing logits in Triton: one launch over all of them, one over the few that a row names (biases, bans); masks alone in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.logits import reference
from modelrunner.kernels.pdl import pdl

BLOCK = 2048  # tokens a program
SPAN = 4  # blocks of a program that lays masks on
ENTRIES = 64  # entries of a list at a time
OUTPUT_UNIT = tl.constexpr(reference.OUTPUT_UNIT)

Seated = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _allowed(x, ids, mask, seat, masks_ptr, words):
    """x where the row's allow list has the ids, else -inf."""
    word = tl.load(masks_ptr + seat.to(tl.int64) * words + ids // 32, mask=mask, other=0)
    return tl.where((word >> (ids % 32)) & 1 != 0, x, -float("inf"))


@triton.jit
def _penalised(
    x, ids, mask, row, seat, counts_ptr, vocab, repetition_ptr, presence_ptr, frequency_ptr,
    known, token_ids, longest, drafts,
):  # fmt: skip
    """x after repetition, presence and frequency penalties; `drafts` tokens behind the known ones count as the output's."""
    word = tl.load(counts_ptr + seat.to(tl.int64) * vocab + ids, mask=mask, other=0)
    first = tl.load(known + row)
    for place in range(first, tl.minimum(first + drafts, longest)):
        word += tl.where(ids == tl.load(token_ids + row * longest + place), OUTPUT_UNIT, 0)
    factor = tl.load(repetition_ptr + row)
    times = (word >> 1).to(tl.float32)
    x = tl.where(word != 0, tl.where(x > 0, x / factor, x * factor), x)
    return x - tl.load(frequency_ptr + row) * times - tl.load(presence_ptr + row) * (word > 1).to(tl.float32)


@triton.jit
def _edit_all(
    logits, out, stride, vocab, rows, known, token_ids, longest, ahead,
    allow_seats, masks, words,
    states, state_masks,
    count_seats, counts, repetition, presence, frequency,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, b): masks and penalties of tokens b * BLOCK onwards of line n."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    if PDL:
        gdc_wait()
    row = tl.load(rows + n).to(tl.int64)
    drafts = 0 if ahead is None else tl.load(ahead + n)
    x = tl.load(logits + n * stride + ids, mask=mask, other=0.0).to(tl.float32)
    if allow_seats is not None:
        seat = tl.load(allow_seats + row)
        if seat >= 0:
            x = _allowed(x, ids, mask, seat, masks, words)
    if states is not None:
        state = tl.load(states + row)
        if state >= 0:
            x = _allowed(x, ids, mask, state, state_masks, words)
    if count_seats is not None:
        seat = tl.load(count_seats + row)
        if seat >= 0:
            factors = (repetition, presence, frequency)
            x = _penalised(x, ids, mask, row, seat, counts, vocab, *factors, known, token_ids, longest, drafts)
    tl.store(out + n * vocab + ids, x, mask=mask)


@triton.jit
def _bits(ids, vocab, seat, masks_ptr, words):
    """1 where the mask in a seat has the ids, 0 where not; 1 everywhere without a seat."""
    word = tl.load(masks_ptr + seat.to(tl.int64) * words + ids // 32, mask=ids < tl.where(seat >= 0, vocab, 0), other=-1)
    return (word >> (ids % 32)) & 1


@triton.jit
def _mask_all(
    logits, stride, vocab, rows, allow_seats, masks, words, states, state_masks, BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (n, b): -inf for those of SPAN blocks of tokens of line n that a mask of the row leaves out. Where it leaves out all of a
    block they are not read, where it leaves out none they are not written."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = n if rows is None else tl.load(rows + n).to(tl.int64)
    seat, state = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    if allow_seats is not None:
        seat = tl.load(allow_seats + row)
    if states is not None:
        state = tl.load(states + row)
    if (seat >= 0) | (state >= 0):
        for block in range(SPAN):
            ids = (tl.program_id(1) * SPAN + block) * BLOCK + tl.arange(0, BLOCK)
            inside = ids < vocab
            kept = tl.full([BLOCK], 1, tl.int32)
            if allow_seats is not None:
                kept &= _bits(ids, vocab, seat, masks, words)
            if states is not None:
                kept &= _bits(ids, vocab, state, state_masks, words)
            if tl.min(kept, 0) == 0:
                x = tl.full([BLOCK], -float("inf"), tl.float32)
                if tl.max(tl.where(inside, kept, 0), 0) != 0:
                    x = tl.where(kept != 0, tl.load(logits + n * stride + ids, mask=inside, other=0.0).to(tl.float32), x)
                tl.store(logits + n * stride + ids, x, mask=inside)


@triton.jit
def _completes(words, entry, some, last, row, total, first, token_ids, longest, TOKENS: tl.constexpr):
    """Whether the output of the row ends with all but the last id of each sequence. words: the row's sequences; entry: numbers of some."""
    same = some & (last >= 0)
    for back in tl.static_range(1, TOKENS):  # the id that stands `back` places before the last one
        wanted = tl.load(words + entry * TOKENS + (TOKENS - 1 - back), mask=some, other=-1)
        place = total - back
        have = tl.load(token_ids + row * longest + place, mask=(place >= first) & (place < longest), other=-2)
        same = same & ((wanted < 0) | (wanted == have))
    return same


@triton.jit
def _edit_named(
    logits, out, stride, vocab, rows, known, token_ids, longest, ahead, prompt_len,
    allow_seats, masks, words,
    states, state_masks,
    bias_seats, biases, num_bias,
    stop_seats, stop_ids, num_stops, min_total,
    word_seats, bad_words, num_words,
    count_seats, counts, repetition, presence, frequency,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: the biases of line n, from the unedited logits, then its bans."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    drafts = 0 if ahead is None else tl.load(ahead + n)
    entries = tl.arange(0, ENTRIES)
    if bias_seats is not None:
        seat = tl.load(bias_seats + row).to(tl.int64)
        if seat >= 0:
            for begin in range(0, num_bias, ENTRIES):
                entry = begin + entries
                ids = tl.load(biases + seat * 2 * num_bias + entry, mask=entry < num_bias, other=-1)
                mask = ids >= 0
                bits = tl.load(biases + (seat * 2 + 1) * num_bias + entry, mask=mask, other=0)
                x = tl.load(logits + n * stride + ids, mask=mask, other=0.0).to(tl.float32)
                if allow_seats is not None:
                    allowing = tl.load(allow_seats + row)
                    if allowing >= 0:
                        x = _allowed(x, ids, mask, allowing, masks, words)
                if states is not None:
                    state = tl.load(states + row)
                    if state >= 0:
                        x = _allowed(x, ids, mask, state, state_masks, words)
                x += bits.to(tl.float32, bitcast=True)
                if count_seats is not None:
                    counting = tl.load(count_seats + row)
                    if counting >= 0:
                        factors = (repetition, presence, frequency)
                        x = _penalised(x, ids, mask, row, counting, counts, vocab, *factors, known, token_ids, longest, drafts)
                tl.store(out + n * vocab + ids, x, mask=mask)
    tl.debug_barrier()  # a ban comes after the bias of the same token
    total = tl.load(known + row) + drafts
    if stop_seats is not None:
        seat = tl.load(stop_seats + row).to(tl.int64)
        if (seat >= 0) & (total < tl.load(min_total + row)):
            for begin in range(0, num_stops, ENTRIES):
                entry = begin + entries
                ids = tl.load(stop_ids + seat * num_stops + entry, mask=entry < num_stops, other=-1)
                tl.store(out + n * vocab + ids, -float("inf"), mask=ids >= 0)
    if word_seats is not None:
        seat = tl.load(word_seats + row).to(tl.int64)
        if seat >= 0:
            first = tl.load(prompt_len + row)
            line = bad_words + seat * num_words * TOKENS
            for begin in range(0, num_words, ENTRIES):
                entry = begin + entries
                some = entry < num_words
                last = tl.load(line + entry * TOKENS + TOKENS - 1, mask=some, other=-1)
                ends = _completes(line, entry, some, last, row, total, first, token_ids, longest, TOKENS)
                tl.store(out + n * vocab + last, -float("inf"), mask=ends)


def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    known: torch.Tensor,
    prompt_len: torch.Tensor,
    token_ids: torch.Tensor,
    allowed: Seated | None,
    bias: Seated | None,
    stops: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    bad_words: Seated | None,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    automata: Seated | None = None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.edit_logits`: two launches, one if no row has biases or bans. One read of the logits, and of the counts of rows with
    penalties."""
    n, vocab = logits.shape
    no_names = bias is None and stops is None and bad_words is None
    dtype = logits.dtype if no_names and penalties is None else torch.float32
    out = torch.empty(n, vocab, dtype=dtype, device=logits.device)
    if n == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    masks = _masks(allowed, automata)
    counts = (None,) * 5 if penalties is None else penalties
    head = (logits, out, logits.stride(0), vocab, rows, known, token_ids, token_ids.stride(0), ahead)
    _edit_all[(n, triton.cdiv(vocab, BLOCK))](*head, *masks, *counts, BLOCK, num_warps=4, **pdl(logits))
    if no_names:
        return out
    _edit_named[(n,)](
        *head, prompt_len, *masks,
        *((None, None, 0) if bias is None else (*bias, bias[1].shape[1] // 2)),
        *((None, None, 0, None) if stops is None else (*stops[:2], stops[1].shape[1], stops[2])),
        *((None, None, 0) if bad_words is None else (*bad_words, bad_words[1].shape[1])),
        *counts, ENTRIES, 1 if bad_words is None else bad_words[1].shape[2], num_warps=2, **pdl(logits),
    )  # fmt: skip
    return out


def _masks(allowed: Seated | None, automata: Seated | None) -> tuple[torch.Tensor | int | None, ...]:
    """The masks as arguments of a kernel."""
    words = next((given[1].shape[1] for given in (allowed, automata) if given is not None), 0)
    return *(allowed or (None, None)), words, *(automata or (None, None))


def mask_logits(logits: torch.Tensor, rows: torch.Tensor | None, allowed: Seated | None, automata: Seated | None) -> None:
    """See `reference.mask_logits`: one launch, which costs next to nothing for rows without a mask. logits.stride(1) must be 1."""
    n, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    if n:
        head = (logits, logits.stride(0), vocab, rows)
        grid = (n, triton.cdiv(vocab, BLOCK * SPAN))
        _mask_all[grid](*head, *_masks(allowed, automata), BLOCK, SPAN, num_warps=4, **pdl(logits))
