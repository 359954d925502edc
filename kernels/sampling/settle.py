"""From chunk peaks and arrival times to a token, one program a row; see `scan.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelrunner.kernels.sampling import reference
from modelrunner.kernels.sampling.noise import exact_exp, exact_log, gumbel, random_words
from modelrunner.kernels.sampling.scan import CHUNK, GREEDY_LIMIT, INF, LN2, PURPOSE, peak_of, place_of, scan

SLACK = tl.constexpr(2.0**-10)  # bounds are good to 2e-5
MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
INF_BITS = tl.constexpr(0x7F800000)
WIDE = 8192


@triton.jit
def _chunk(logits, vocab, chunk, CHUNK: tl.constexpr):
    """Ids and logits of a chunk, -inf beyond the vocabulary."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    return ids, tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)


@triton.jit
def _best_token(logits, vocab, places, peaks, best, CHUNK: tl.constexpr):
    """The lowest id that holds the row's best logit (or NaN)."""
    ids, x = _chunk(logits, vocab, place_of(peaks, best, places), CHUNK)
    return tl.minimum(place_of(x, best, ids), vocab - 1)


@triton.jit
def _draw(logits, vocab, places, bounds, best, heat, cut, below, seed, position, choice, CHUNK: tl.constexpr):
    """The token of the largest noise - distance, the lowest id among equals, of those at a distance <= cut and < below.

    Chunks are looked at in the order of their bounds, until no bound reaches what was found.
    """
    found = -INF
    token = 0
    top = tl.max(bounds, 0)
    while (top > -INF) & (top + SLACK >= found):
        chunk = tl.min(tl.where(bounds == top, places, 0x7FFFFFFF), 0)
        ids, x = _chunk(logits, vocab, chunk, CHUNK)
        distance = tl.math.div_rn(best - x, heat)
        words = random_words(seed, position, choice, PURPOSE, chunk * CHUNK, CHUNK)
        noisy = tl.where((distance <= cut) & (distance < below), gumbel(words) - distance, -INF)
        value = tl.max(noisy, 0)
        first = tl.min(tl.where(noisy == value, ids, 0x7FFFFFFF), 0)
        better = (value > found) | ((value == found) & (first < token))
        token = tl.where(better & (value > -INF), first, token)
        found = tl.maximum(found, value)
        bounds = tl.where(places == chunk, -INF, bounds)
        top = tl.max(bounds, 0)
    return token


@triton.jit
def _count(logits, vocab, best, heat, limit, WIDE: tl.constexpr):
    """How many tokens of the row are at a distance of at most `limit` (bits of one)."""
    count = tl.zeros([WIDE], tl.int32)
    for start in range(0, vocab, WIDE):
        ids = start + tl.arange(0, WIDE)
        x = tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)
        bits = tl.math.div_rn(best - x, heat).to(tl.int32, bitcast=True)
        count += ((bits <= limit) & (ids < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _weigh(logits, vocab, best, heat, cut, below, WIDE: tl.constexpr):
    """The mass of all tokens at a distance <= cut and < below, an integer."""
    mass = tl.zeros([WIDE], tl.int64)
    for start in range(0, vocab, WIDE):
        ids = start + tl.arange(0, WIDE)
        x = tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)
        distance = tl.math.div_rn(best - x, heat)
        mass += tl.where((distance <= cut) & (distance < below), exact_exp(-distance) * MASS_UNIT, 0.0).to(tl.int64)
    return tl.sum(mass, 0)


@triton.jit
def _kth(logits, vocab, best, heat, k, WIDE: tl.constexpr):
    """The distance of the k-th best token, by bisection of its bits."""
    low, high = 0, INF_BITS
    while low < high:
        middle = low + (high - low) // 2
        enough = _count(logits, vocab, best, heat, middle, WIDE) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _settle(
    logits,
    stride,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    choice,
    peaks,
    times,
    chunks,
    tokens,
    good,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    WIDE: tl.constexpr,
    NOISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    places = tl.arange(0, PLACES)
    peak = tl.load(peaks + row * chunks + places, mask=places < chunks, other=-INF)
    best = peak_of(peak)
    ok = tl.abs(best) < INF
    tl.store(good + row, ok)
    draws = False
    if NOISE:
        heat = tl.load(temperature + row)
        draws = ok & (heat > GREEDY_LIMIT)
    if draws:
        if NOISE:
            key, where, which = tl.load(seed + row), tl.load(position + row).to(tl.int64), tl.load(choice + row).to(tl.int64)
            cut = INF
            if min_p is not None:
                cut = tl.maximum(-exact_log(tl.load(min_p + row)), 0.0)
            if top_k is not None:
                k = tl.load(top_k + row)
                if (k > 0) & (k < vocab):
                    cut = tl.minimum(cut, _kth(logits, vocab, best, heat, k, WIDE))
            time = tl.load(times + row * chunks + places, mask=places < chunks, other=INF)
            distance = tl.math.div_rn(best - peak, heat)
            bounds = tl.where(distance <= cut, tl.log2(time) * -LN2 - distance, -INF)
            token = _draw(logits, vocab, places, bounds, best, heat, cut, INF, key, where, which, CHUNK)
            if top_p is not None:
                p = tl.load(top_p + row)
                if p < 1.0:
                    total = _weigh(logits, vocab, best, heat, cut, INF, WIDE)
                    share = tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)
                    wanted = tl.minimum(tl.maximum(share, 1), total)
                    below = tl.math.div_rn(best - tl.load(logits + token).to(tl.float32), heat)
                    while _weigh(logits, vocab, best, heat, cut, below, WIDE) >= wanted:
                        kept = tl.where(distance < below, bounds, -INF)
                        token = _draw(logits, vocab, places, kept, best, heat, cut, below, key, where, which, CHUNK)
                        below = tl.math.div_rn(best - tl.load(logits + token).to(tl.float32), heat)
            tl.store(tokens + row, token.to(tl.int64))
    else:
        tl.store(tokens + row, _best_token(logits, vocab, places, peak, best, CHUNK).to(tl.int64))


def _run(
    logits: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    filters: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """columns: temperature, seed, position, choice; None: greedy. filters: top_k, top_p, min_p."""
    n, vocab = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    ok = torch.empty(n, dtype=torch.bool, device=logits.device)
    if n == 0:
        return tokens, ok
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    peaks, times = scan(logits, columns)
    chunks = peaks.shape[1]
    temperature, *draw = columns or (None,) * 4
    _settle[(n,)](
        logits,
        logits.stride(0),
        vocab,
        temperature,
        *filters,
        *draw,
        peaks,
        times,
        chunks,
        tokens,
        ok,
        CHUNK,
        max(16, triton.next_power_of_2(chunks)),
        min(WIDE, max(16, triton.next_power_of_2(vocab))),
        columns is not None,
        num_warps=4 if filters[0] is None and filters[1] is None else 8,
    )
    return tokens, ok


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.greedy`: two launches, one read of the logits."""
    return _run(logits, None, (None, None, None))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
    choice: torch.Tensor,
    uniforms: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.sample`: two launches, one read of the logits for rows without filters."""
    if uniforms is not None:
        return reference.sample(logits, temperature, top_k, top_p, min_p, seed, position, choice, uniforms)
    return _run(logits, (temperature, seed, position, choice), (top_k, top_p, min_p))
