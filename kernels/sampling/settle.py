"""From peaks and masses of groups (`scan.py`) to a token for every row.

One program a row settles greedy rows, rows with a small top-k, and rows whose token no filter can drop. Otherwise the row's token is
weighed: it stays if the tokens better than it hold less than top-p of the mass. All programs together weigh them, and a last program a row
confirms the token, or draws again among the better ones, until one stays.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.sampling.noise import exact_log
from modelrunner.kernels.sampling.scan import GREEDY_LIMIT, INF, draw_key, is_short, peak_of
from modelrunner.kernels.sampling.search import (
    FEW,
    OTHERS,
    best_token,
    cut_of_list,
    distance_at,
    distance_of,
    draw,
    draw_listed,
    draw_row,
    kth_of_row,
    nearest_of_block,
    nucleus_of_row,
    shortlist,
    wanted_mass,
    weigh_block,
)

SETTLED = tl.constexpr(-1.0)  # in place of a cut


@triton.jit
def _token_of_list(listed, count, heat, cut, k, p, key, where, which, LIST: tl.constexpr):
    """The token of a row whose list is complete. listed: see `shortlist`; cut: of min-p."""
    near = cut_of_list(listed, count, heat, cut, k, p, LIST, FEW, OTHERS)
    if count <= FEW:
        token = draw_listed(listed, count, heat, near, key, where, which, LIST, FEW)
    else:
        token = draw_listed(listed, count, heat, near, key, where, which, LIST, LIST)
    return token


@triton.jit
def _settle_drawn(
    logits,
    vocab,
    row,
    line,
    best,
    peak,
    heat,
    top_k,
    top_p,
    min_p,
    key,
    where,
    which,
    peaks,
    masses,
    scratch,
    groups,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The token of a row that draws, and the cut by which it is still to be weighed (SETTLED: it is final)."""
    cut = INF
    if min_p is not None:
        cut = tl.maximum(-exact_log(tl.load(min_p + line)), 0.0)
    p = 1.0
    if top_p is not None:
        p = tl.load(top_p + line)
    token = -1
    left = SETTLED
    short = False
    if top_k is not None:
        k = tl.load(top_k + line)
        short = is_short(k)
        if short:
            own = scratch + row * (PLACES + 2 * LIST)
            count = shortlist(logits, vocab, peaks + row * groups, groups, own, best, k, GROUP, PLACES, TILE, LIST)
            if count <= LIST:
                token = _token_of_list(own + PLACES, count, heat, cut, k, p, key, where, which, LIST)
        if (token < 0) & (k > 0) & (k < vocab):
            cut = tl.minimum(cut, kth_of_row(logits, vocab, best, heat, k, WIDE))
    if token < 0:
        if short:  # of too many tokens for its list
            if p < 1.0:
                cut = tl.minimum(cut, nucleus_of_row(logits, vocab, best, heat, cut, p, WIDE))
            token = draw_row(logits, vocab, best, heat, cut, key, where, which, WIDE)
        else:
            places = tl.arange(0, PLACES)
            mass = tl.load(masses + row * groups + places, mask=places < groups, other=0)
            likely = exact_log(mass.to(tl.float32)) - distance_of(peak, best, heat)
            token = draw(logits, vocab, likely, best, heat, INF, INF, key, where, which, 0, GROUP, PLACES)
            if cut < INF:
                left = tl.where(distance_at(logits, token, best, heat) > cut, cut, left)
            left = tl.where(p < 1.0, cut, left)
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
    masses,
    scratch,
    groups,
    tokens,
    counts,
    good,
    state,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token for each row. state: [n, 2] float32, None without filters: what `_settle_drawn` leaves, and the best logit."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    places = tl.arange(0, PLACES)
    peak = tl.load(peaks + row * groups + places, mask=places < groups, other=-INF)
    best = peak_of(peak, 0)
    ok = tl.abs(best) < INF
    tl.store(good + row, ok)
    if counts is not None:
        tl.store(counts + row, (ok & (tl.load(samples + row) != 0)).to(tl.int32))
    draws = False
    if masses is not None:
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        draws = ok & (heat > GREEDY_LIMIT)
    left = SETTLED
    if draws:
        if masses is not None:
            key, where, which = draw_key(row, line, seed, position, more, choice)
            token, left = _settle_drawn(
                logits, vocab, row, line, best, peak, heat, top_k, top_p, min_p, key, where, which,
                peaks, masses, scratch, groups, GROUP, PLACES, TILE, LIST, WIDE,
            )  # fmt: skip
            tl.store(tokens + row, token.to(tl.int64))
    else:
        tl.store(tokens + row, best_token(logits, vocab, places, peak, best, GROUP).to(tl.int64))
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
    groups,
    tokens,
    state,
    lighter,
    sums,
    parts,
    steps,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows that are not settled. sums: [n, parts] int64, the mass at a distance <= the row's cut. lighter: [n, groups] int64, that of
    each group's tokens that are also better than the row's."""
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
        total = tl.zeros([BLOCK], tl.int64)
        for block in range(part * steps, tl.minimum(part * steps + steps, tl.cdiv(vocab, BLOCK))):
            nearest = nearest_of_block(peaks + row * groups, vocab, block, best, heat, BLOCK, GROUP)
            total += weigh_block(logits, vocab, nearest, block, best, heat, cut, below, lighter + row * groups, BLOCK, GROUP)
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))


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
    groups,
    tokens,
    state,
    lighter,
    sums,
    parts,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replaces the tokens that filters drop."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(state + row * 2)
    if cut >= 0.0:
        best = tl.load(state + row * 2 + 1)
        logits += row * stride
        lighter += row * groups
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        part = tl.arange(0, PARTS)
        total = tl.sum(tl.load(sums + row * parts + part, mask=part < parts, other=0), 0)
        places = tl.arange(0, PLACES)
        mass = tl.load(lighter + places, mask=places < groups, other=0)
        p = 1.0
        if top_p is not None:
            p = tl.load(top_p + line)
        wanted = wanted_mass(total, p)
        below = distance_at(logits, tl.load(tokens + row), best, heat)
        again = (below > cut) | ((p < 1.0) & (tl.sum(mass, 0) >= wanted))
        if again:
            key, where, which = draw_key(row, line, seed, position, more, choice)
            attempt = 1
            token = 0
            while again:
                likely = exact_log(mass.to(tl.float32))
                token = draw(logits, vocab, likely, best, heat, cut, below, key, where, which, attempt, GROUP, PLACES)
                below = distance_at(logits, token, best, heat)
                again = p < 1.0
                if again:
                    for block in range(tl.cdiv(vocab, BLOCK)):
                        nearest = nearest_of_block(peaks + row * groups, vocab, block, best, heat, BLOCK, GROUP)
                        weigh_block(logits, vocab, nearest, block, best, heat, cut, below, lighter, BLOCK, GROUP)
                    tl.debug_barrier()  # the masses are there for every thread
                    mass = tl.load(lighter + places, mask=places < groups, other=0)
                    again = tl.sum(mass, 0) >= wanted
                    tl.debug_barrier()  # and are overwritten only then
                attempt += 1
            tl.store(tokens + row, token.to(tl.int64))
