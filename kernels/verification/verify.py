"""Verification in Triton: the sampling kernels draw a token for every line, and a last, small launch finds how far a row's drafts hold.

With probabilities of the drafter two reads of the lines that a draft follows come in between: one for the sums that make logits
probabilities, one for the token that replaces a rejected draft. With typical acceptance it is the first alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.logprobs.filtered import processed_logits
from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.sampling import philox
from modelrunner.kernels.sampling.launch import _run, places_of
from modelrunner.kernels.sampling.noise import exact_log, gumbel, random_words, random_words_of, uniform
from modelrunner.kernels.sampling.scan import GREEDY_LIMIT, INF, Columns

BLOCK = 1024
STEPS = 4  # blocks a program
ACCEPT = tl.constexpr(philox.PURPOSE_ACCEPT)
RECOVER = tl.constexpr(philox.PURPOSE_RECOVER)
NOWHERE = tl.constexpr(0x7FFFFFFF)

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_ANY_SIZE = ["longest", "lines", "segments", "K"]


@triton.jit
def _draft(line, mask, rows, samples, computed, query_len, token_ids, longest):
    """Of lines that another line of the same row follows (mask): row, position, and the draft that the next line has ahead, or -1."""
    row = tl.load(rows + line, mask=mask, other=0).to(tl.int64)
    where = tl.load(computed + line, mask=mask, other=0) + tl.load(query_len + line, mask=mask, other=0)
    counts = mask & (tl.load(samples + line + 1, mask=mask, other=0) != 0)
    return row, where.to(tl.int64), tl.load(token_ids + row * longest + where, mask=counts, other=-1)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _sums(
    rows, samples, computed, query_len, token_ids, longest, temperature, scores, heats, lines, stride, vocab, sums, segments, K,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (m, s): STEPS blocks of the scores of draft m. lines: of scores, a row. heats: what scores are divided by; None: 1.

    sums: [N * K, segments, 3], of the segment's scores: the best one and, relative to it, the sums of exp(-distance) and of
    exp(-distance) * distance.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    n, j = m // K, m % K
    row, _, draft = _draft(n * (K + 1) + j, True, rows, samples, computed, query_len, token_ids, longest)
    if (draft >= 0) & (tl.load(temperature + row) > GREEDY_LIMIT):
        heat = 1.0 if heats is None else tl.load(heats + row)
        scores += (n * lines + j) * stride
        best, total, spread = -INF, 0.0, 0.0
        for step in range(STEPS):
            ids = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(scores + ids, mask=ids < vocab, other=-INF).to(tl.float32)
            peak = tl.maximum(best, tl.max(x, 0))
            base = tl.where(peak == -INF, 0.0, peak)
            shift = tl.where(best == -INF, 0.0, (base - best) / heat)
            distance = tl.where(x == -INF, 0.0, (base - x) / heat)
            weight = tl.where(x == -INF, 0.0, tl.exp(-distance))
            spread = tl.exp(-shift) * (spread + shift * total) + tl.sum(weight * distance, 0)
            total = tl.exp(-shift) * total + tl.sum(weight, 0)
            best = peak
        place = sums + (m * segments + tl.program_id(1)) * 3
        tl.store(place, best)
        tl.store(place + 1, total)
        tl.store(place + 2, spread)


@triton.jit
def _whole(sums, segments, heat, PARTS: tl.constexpr):
    """Of a draft's segments together: the best score, and relative to it the two sums."""
    part = tl.arange(0, PARTS)
    peaks = tl.load(sums + part * 3, mask=part < segments, other=-INF)
    totals = tl.load(sums + part * 3 + 1, mask=part < segments, other=0.0)
    spreads = tl.load(sums + part * 3 + 2, mask=part < segments, other=0.0)
    best = tl.max(peaks, 0)
    shift = tl.where(peaks == -INF, 0.0, (best - peaks) / heat)
    scale = tl.where(peaks == -INF, 0.0, tl.exp(-shift))
    return best, tl.sum(scale * totals, 0), tl.sum(scale * (spreads + shift * totals), 0)


@triton.jit
def _holds(
    scores, draft, key, where, which, heat, sums, segments, draft_probs, threshold, factor,
    PARTS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """1 if a row that draws accepts a draft, else 0. scores, sums, draft_probs: those of the draft."""
    best, total, spread = _whole(sums, segments, heat, PARTS)
    chance = tl.exp((tl.load(scores + draft).to(tl.float32) - best) / heat) / total
    if TYPICAL:
        entropy = tl.log(total) + spread / total
        return (chance > tl.minimum(factor * tl.exp(-entropy), threshold)).to(tl.int32)
    else:
        coin = uniform(random_words_of(key, where, which, ACCEPT, tl.zeros([1], tl.int32)))
        return tl.max((coin * tl.load(draft_probs + draft) < chance).to(tl.int32), 0)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _recover(
    rows, samples, computed, query_len, token_ids, longest, temperature, seed, choice, scores, heats, lines, stride, vocab, sums, segments,
    draft_probs, found, places, K,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (m, s): of the blocks that `_sums` took, the token of max(p - q, 0) that its noise puts first, if draft m is rejected.

    found, places: [N * K, segments] float32 and int32.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    n, j = m // K, m % K
    row, where, draft = _draft(n * (K + 1) + j, True, rows, samples, computed, query_len, token_ids, longest)
    if (draft >= 0) & (tl.load(temperature + row) > GREEDY_LIMIT):
        heat = 1.0 if heats is None else tl.load(heats + row)
        scores += (n * lines + j) * stride
        sums += m * segments * 3
        draft_probs += m * vocab
        key, which = tl.load(seed + row), tl.load(choice + row).to(tl.int64)
        kept = _holds(scores, draft, key, where, which, heat, sums, segments, draft_probs, 0.0, 0.0, PARTS, False)
        if kept == 0:
            best, total, _ = _whole(sums, segments, heat, PARTS)
            most, token = -INF, NOWHERE
            for step in range(STEPS):
                start = (tl.program_id(1) * STEPS + step) * BLOCK
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(scores + ids, mask=ids < vocab, other=-INF).to(tl.float32)
                surplus = tl.exp((x - best) / heat) / total - tl.load(draft_probs + ids, mask=ids < vocab, other=1.0)
                noisy = gumbel(random_words(key, where, which, RECOVER, start, BLOCK))
                noisy = tl.where(surplus > 0.0, exact_log(tl.where(surplus > 0.0, surplus, 1.0)) + noisy, -INF)
                value = tl.max(noisy, 0)
                first = tl.min(tl.where(noisy == value, ids, NOWHERE), 0)
                token = tl.where(value > most, first, token)
                most = tl.maximum(most, value)
            place = m * segments + tl.program_id(1)
            tl.store(found + place, most)
            tl.store(places + place, token)


@triton.jit
def _replacement(found, places, segments, PARTS: tl.constexpr):
    """The best of what `_recover` found for a draft, and its token."""
    part = tl.arange(0, PARTS)
    value = tl.load(found + part, mask=part < segments, other=-INF)
    most = tl.max(value, 0)
    ids = tl.load(places + part, mask=part < segments, other=NOWHERE)
    return most, tl.min(tl.where(value == most, ids, NOWHERE), 0)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _accept(
    rows, samples, computed, query_len, token_ids, longest, temperature, seed, choice, scores, heats, lines, stride, vocab, sums, segments,
    draft_probs, found, places, threshold, factor, tokens, good, counts, ok, K,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, JUDGED: tl.constexpr, TYPICAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: how far the drafts of row n hold. tokens: [N, 1 + K] int64, drawn, of which drafts and recovered ones are put right."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    own = n * (K + 1) + slot
    drawn = tl.load(tokens + own, mask=slot <= K, other=-2)
    fine = tl.load(good + own, mask=slot <= K, other=0) != 0
    _, _, proposed = _draft(own, slot < K, rows, samples, computed, query_len, token_ids, longest)
    holds = (proposed >= 0) & (proposed == drawn)
    if JUDGED:  # noqa: SIM102  (the compiler must not see the rest)
        if tl.load(temperature + tl.load(rows + n * (K + 1))) > GREEDY_LIMIT:
            for j in range(K):
                row, where, draft = _draft(n * (K + 1) + j, True, rows, samples, computed, query_len, token_ids, longest)
                if draft >= 0:
                    m = n * K + j
                    heat = 1.0 if heats is None else tl.load(heats + row)
                    key, which = tl.load(seed + row), tl.load(choice + row).to(tl.int64)
                    line, total = scores + (n * lines + j) * stride, sums + m * segments * 3
                    q = draft_probs
                    if not TYPICAL:
                        q += m * vocab
                    kept = _holds(line, draft, key, where, which, heat, total, segments, q, threshold, factor, PARTS, TYPICAL)
                    if TYPICAL:
                        holds = tl.where(slot == j, holds | (kept != 0), holds)
                    else:
                        holds = tl.where(slot == j, kept != 0, holds)
                        if kept == 0:
                            most, token = _replacement(found + m * segments, places + m * segments, segments, PARTS)
                            drawn = tl.where(slot == tl.where(most > -INF, j, -1), token.to(tl.int64), drawn)
            drawn = tl.where(holds, proposed.to(tl.int64), drawn)
            tl.store(tokens + own, drawn, mask=slot < K)
    stops = tl.min(tl.where(holds & fine, WIDTH, slot), 0)  # the first slot that is not gone beyond
    last = tl.max(tl.where(slot == stops, fine.to(tl.int32), 0), 0)
    first = tl.max(tl.where(slot == 0, fine.to(tl.int32), 0), 0)
    tl.store(counts + n, tl.where(tl.load(samples + n * (K + 1)) != 0, stops + last, 0))
    tl.store(ok + n, first != 0)


@dataclass(frozen=True)
class Judged:
    """What is known of drafts of rows that draw. scores: [N * lines, V], over `heats` [R] (None: 1) the logarithms of what is drawn from,
    but for a constant a line. sums: see `_sums`. found, places: see `_recover`, None with typical acceptance."""

    scores: torch.Tensor
    heats: torch.Tensor | None
    lines: int
    sums: torch.Tensor
    found: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def segments(self) -> int:
        return self.sums.shape[1]

    @property
    def given(self) -> tuple[torch.Tensor | int | None, ...]:
        """Arguments of the kernels, from `scores` to `segments`."""
        scores = self.scores
        return scores, self.heats, self.lines, scores.stride(0), scores.shape[1], self.sums, self.segments


NOT_JUDGED = (None, None, 0, 0, 0, None, 0)
Head = tuple[torch.Tensor | int | None, ...]  # arguments of the kernels, from `rows` to `temperature` or `choice`


def verify_drafts(
    logits: torch.Tensor,
    rows: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    query_len: torch.Tensor,
    token_ids: torch.Tensor,
    slots: int,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    choice: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    typical: tuple[float, float] | None = None,
) -> Result:
    """See `reference.verify_drafts`: the launches of `greedy` or `sample`, and one more; one read of the logits.

    draft_probs cost two launches and two reads of the logits of drafts more, typical acceptance one of each. With either of them, rows with
    filters have what they draw from written out first.
    """
    n, k = logits.shape[0] // slots, slots - 1
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    columns = None
    if temperature is not None:
        columns = Columns(temperature, top_k, top_p, min_p, seed, choice, computed, query_len, rows)
    flat, good, _ = _run(logits, columns, None)
    counts, ok = torch.empty(n, dtype=torch.int32, device=rows.device), torch.empty(n, dtype=torch.bool, device=rows.device)
    if n == 0:
        return flat.view(n, slots), counts, ok
    head: Head = (rows, samples, computed, query_len, token_ids, token_ids.stride(0), temperature)
    judged, probs = None, None
    if temperature is not None and k and (draft_probs is not None or typical is not None):
        judged = _judged(head, logits, slots, (temperature, top_k, top_p, min_p))
        if typical is None:
            assert draft_probs is not None
            probs = draft_probs.contiguous()
            judged = _recovered((*head, seed, choice), judged, k, probs)
    given, found, parts = NOT_JUDGED, (None, None), 1
    if judged is not None:
        given, found, parts = judged.given, (judged.found, judged.places), judged.segments  # type: ignore[assignment]
    constants = (k, max(2, triton.next_power_of_2(slots)), places_of(parts), judged is not None, typical is not None)
    out = (flat, good, counts, ok)
    _accept[(n,)](*head, seed, choice, *given, probs, *found, *(typical or (0.0, 0.0)), *out, *constants, num_warps=1, **pdl(logits))
    return flat.view(n, slots), counts, ok


def _judged(head: Head, logits: torch.Tensor, slots: int, columns: tuple[torch.Tensor | None, ...]) -> Judged:
    """columns: temperature and the filters."""
    (many, vocab), k = logits.shape, slots - 1
    n, rows = many // slots, head[0]
    assert isinstance(rows, torch.Tensor)
    scores, heats, lines = logits, columns[0], slots
    if any(column is not None for column in columns[1:]):
        own = rows.view(n, slots)[:, :k].flatten()
        given = (None if column is None else column.index_select(0, own) for column in columns)
        scores = processed_logits(logits.unflatten(0, (n, slots))[:, :k].flatten(0, 1), *given)  # type: ignore[arg-type]
        heats, lines = None, k
    segments = triton.cdiv(vocab, BLOCK * STEPS)
    found = Judged(scores, heats, lines, torch.empty(n * k, segments, 3, device=logits.device))
    _sums[(n * k, segments)](*head, *found.given, k, BLOCK, STEPS, num_warps=4, **pdl(logits))
    return found


def _recovered(head: Head, judged: Judged, k: int, draft_probs: torch.Tensor) -> Judged:
    many = judged.sums.shape[0]
    found = torch.empty(many, judged.segments, device=draft_probs.device)
    places = torch.empty(many, judged.segments, dtype=torch.int32, device=draft_probs.device)
    out, constants = (draft_probs, found, places), (k, BLOCK, STEPS, places_of(judged.segments))
    _recover[(many, judged.segments)](*head, *judged.given, *out, *constants, num_warps=4, **pdl(draft_probs))
    return replace(judged, found=found, places=places)
