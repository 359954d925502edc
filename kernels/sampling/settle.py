"""From peaks and arrival times (`scan.py`) to a token for every row.

One program a row settles greedy rows, rows without a filter or with min-p, and rows with a small top-k. Top-p alone first takes the token
drawn without it: it stays if the tokens better than it hold less than top-p of the mass. All programs together weigh them, and a last
program a row confirms the token, or draws again among the better ones, until one stays. That gives the token of the filtered
distribution: of the tokens that stay, the one that the noise puts first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.sampling.noise import exact_log
from modelrunner.kernels.sampling.scan import GREEDY_LIMIT, INF, LN2, draw_key, is_short, peak_of
from modelrunner.kernels.sampling.search import (
    FEW,
    NO_MASS,
    OTHERS,
    best_token,
    cut_of_list,
    distance_at,
    distance_of,
    draw,
    draw_listed,
    kth_of_row,
    load_chunk,
    mass_of,
    shortlist,
    wanted_mass,
    weigh_row,
)

SETTLED = tl.constexpr(-1.0)  # in place of a cut


@triton.jit
def _settle_drawn(
    logits,
    vocab,
    row,
    line,
    best,
    peak,
    places,
    heat,
    top_k,
    top_p,
    min_p,
    key,
    where,
    which,
    times,
    group_peaks,
    scratch,
    chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The token of a row that draws, and the cut that top-p is still to be applied below (SETTLED: the token is final)."""
    cut = INF
    if min_p is not None:
        cut = tl.maximum(-exact_log(tl.load(min_p + line)), 0.0)
    p = 1.0
    if top_p is not None:
        p = tl.load(top_p + line)
    token = -1
    if top_k is not None:
        k = tl.load(top_k + line)
        if is_short(k):
            own = scratch + row * (GROUPS + 2 * LIST)
            groups = chunks * (CHUNK // GROUP)
            count, limit = shortlist(logits, vocab, group_peaks + row * groups, groups, own, best, heat, k, GROUP, GROUPS, TILE, LIST)
            if count <= LIST:
                near = cut_of_list(own + GROUPS, count, cut, limit, k, p, LIST, FEW, OTHERS)
                if count <= FEW:
                    token = draw_listed(own + GROUPS, count, near, key, where, which, LIST, FEW)
                else:
                    token = draw_listed(own + GROUPS, count, near, key, where, which, LIST, LIST)
            else:  # no race was held: any chunk may hold the winner
                tl.store(times + row * chunks + places, tl.zeros_like(peak), mask=places < chunks)
                tl.debug_barrier()
    left = SETTLED
    if token < 0:
        if top_k is not None:
            k = tl.load(top_k + line)
            if (k > 0) & (k < vocab):
                cut = tl.minimum(cut, kth_of_row(logits, vocab, best, heat, k, WIDE))
        time = tl.load(times + row * chunks + places, mask=places < chunks, other=INF)
        distance = distance_of(peak, best, heat)
        bounds = tl.where((distance <= cut) & (distance < INF), tl.log2(time) * -LN2 - distance, -INF)
        token = draw(logits, vocab, places, bounds, best, heat, cut, INF, key, where, which, CHUNK)
        left = tl.where(p < 1.0, cut, SETTLED)
    return token, left


@triton.jit
def _settle(
    logits,
    stride,
    vocab,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    more,
    choice,
    samples,
    peaks,
    times,
    group_peaks,
    scratch,
    chunks,
    tokens,
    counts,
    good,
    state,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
    NOISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token for each row. state: [n, 2] float32, only with top_p: what `_settle_drawn` leaves to top-p, and the best logit."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    places = tl.arange(0, PLACES)
    peak = tl.load(peaks + row * chunks + places, mask=places < chunks, other=-INF)
    best = peak_of(peak, 0)
    ok = tl.abs(best) < INF
    tl.store(good + row, ok)
    if counts is not None:
        tl.store(counts + row, (ok & (tl.load(samples + row) != 0)).to(tl.int32))
    draws = False
    if NOISE:
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        draws = ok & (heat > GREEDY_LIMIT)
    left = SETTLED
    if draws:
        if NOISE:
            key, where, which = draw_key(row, line, seed, position, more, choice)
            token, left = _settle_drawn(
                logits, vocab, row, line, best, peak, places, heat, top_k, top_p, min_p, key, where, which,
                times, group_peaks, scratch, chunks, CHUNK, GROUP, GROUPS, TILE, LIST, WIDE,
            )  # fmt: skip
            tl.store(tokens + row, token.to(tl.int64))
    else:
        tl.store(tokens + row, best_token(logits, vocab, places, peak, best, CHUNK).to(tl.int64))
    if state is not None:
        tl.store(state + row * 2, left)
        tl.store(state + row * 2 + 1, best)


@triton.jit(do_not_specialize=["parts", "steps"])
def _weigh(
    logits,
    stride,
    vocab,
    rows,
    temperature,
    peaks,
    chunks,
    tokens,
    state,
    sums,
    parts,
    steps,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums: [n, parts, 2] int64, the mass below the cut and, of it, that of tokens better than the row's. Settled rows are left out."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    cut = tl.load(state + row * 2)
    if cut >= 0.0:
        best = tl.load(state + row * 2 + 1)
        logits += row * stride
        heat = tl.load(temperature + (row if rows is None else tl.load(rows + row).to(tl.int64)))
        below = distance_at(logits, tl.load(tokens + row), best, heat)
        total = tl.zeros([CHUNK], tl.int64)
        better = tl.zeros([CHUNK], tl.int64)
        for chunk in range(part * steps, tl.minimum(part * steps + steps, chunks)):
            nearest = distance_of(tl.load(peaks + row * chunks + chunk), best, heat)
            if (nearest <= cut) & (nearest < NO_MASS):
                _, x = load_chunk(logits, vocab, chunk * CHUNK, CHUNK)
                distance = distance_of(x, best, heat)
                mass = tl.where(distance <= cut, mass_of(distance), 0)
                total += mass
                better += tl.where(distance < below, mass, 0)
        tl.store(sums + tl.program_id(0).to(tl.int64) * 2, tl.sum(total, 0))
        tl.store(sums + tl.program_id(0).to(tl.int64) * 2 + 1, tl.sum(better, 0))


@triton.jit(do_not_specialize=["parts"])
def _confirm(
    logits,
    stride,
    vocab,
    rows,
    temperature,
    top_p,
    seed,
    position,
    more,
    choice,
    peaks,
    times,
    chunks,
    tokens,
    state,
    sums,
    parts,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replaces the tokens that top-p drops."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(state + row * 2)
    if cut >= 0.0:
        best = tl.load(state + row * 2 + 1)
        logits += row * stride
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        part = tl.arange(0, PLACES)  # there are no more parts than chunks
        here = sums + (row * parts + part) * 2
        total = tl.sum(tl.load(here, mask=part < parts, other=0), 0)
        better = tl.sum(tl.load(here + 1, mask=part < parts, other=0), 0)
        wanted = wanted_mass(total, tl.load(top_p + line))
        if better >= wanted:
            heat = tl.load(temperature + line)
            key, where, which = draw_key(row, line, seed, position, more, choice)
            places = tl.arange(0, PLACES)
            peak = tl.load(peaks + row * chunks + places, mask=places < chunks, other=-INF)
            time = tl.load(times + row * chunks + places, mask=places < chunks, other=0.0)
            distance = distance_of(peak, best, heat)
            bounds = tl.where((distance <= cut) & (distance < INF), tl.log2(time) * -LN2 - distance, -INF)
            token = tl.load(tokens + row).to(tl.int32)
            while better >= wanted:
                below = distance_at(logits, token, best, heat)
                bounds = tl.where(distance < below, bounds, -INF)
                token = draw(logits, vocab, places, bounds, best, heat, cut, below, key, where, which, CHUNK)
                better = weigh_row(logits, vocab, peaks + row * chunks, best, heat, cut, distance_at(logits, token, best, heat), CHUNK)
            tl.store(tokens + row, token.to(tl.int64))
