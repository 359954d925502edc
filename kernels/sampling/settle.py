"""From peaks and masses of groups (`scan.py`) to a token for every row.

One program a row settles greedy rows, rows with a small top-k, and rows whose token no filter can drop. Otherwise a few tokens are drawn,
and one stays if the tokens better than it hold less than top-p of the mass. All programs together weigh what is better than each of them,
and a last program a row takes the first that stays, or draws again among those that are better than all, until one stays.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.sampling import reference
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
    measure_listed,
    note_weights,
    nucleus_of_row,
    shortlist,
    weights_of_block,
)

TRIES = tl.constexpr(reference.TRIES)
SETTLED = tl.constexpr(-1.0)  # in place of a cut


@triton.jit
def _token_of_list(listed, count, cut, k, p, key, where, which, LIST: tl.constexpr):
    """The token of a row whose list is complete. listed: see `measure_listed`; cut: of min-p."""
    near = cut_of_list(listed, count, cut, k, p, LIST, FEW, OTHERS)
    if count <= FEW:
        token = draw_listed(listed, count, near, key, where, which, LIST, FEW)
    else:
        token = draw_listed(listed, count, near, key, where, which, LIST, LIST)
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
    tries,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The token of a row that draws; or, with the cut of its filters but top-p, its tries to be weighed. SETTLED: the token is final."""
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
                measure_listed(logits, own + PLACES, count, best, heat, LIST)
                token = _token_of_list(own + PLACES, count, cut, k, p, key, where, which, LIST)
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
            if tries is None:
                token = draw(logits, vocab, likely, best, heat, INF, -INF, key, where, which, 0, GROUP, PLACES)
            else:
                open_ended = (p < 1.0) | (cut < INF)
                for attempt in range(tl.where(open_ended, TRIES, 1)):
                    found = draw(logits, vocab, likely, best, heat, INF, -INF, key, where, which, attempt, GROUP, PLACES)
                    tl.store(tries + row * TRIES + attempt, found)
                    token = tl.where((token < 0) & (distance_at(logits, found, best, heat) <= cut), found, token)
                left = tl.where((p < 1.0) | (token < 0), cut, SETTLED)
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
    tries,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token for each row. state: [n, 2] float32, None without filters: the cut that `_settle_drawn` leaves, and the best logit. tries:
    [n, TRIES] int32, with state."""
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
                peaks, masses, scratch, groups, tries, GROUP, PLACES, TILE, LIST, WIDE,
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
    state,
    tries,
    weights,
    parts,
    steps,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows that are not settled, TILE groups `steps` times. weights: [n, 1 + TRIES, groups] float32: of each group the weight of its
    tokens at a distance <= the row's cut, and of these that of the better ones than each try."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    cut = tl.load(state + row * 2)
    if cut >= 0.0:
        best = tl.load(state + row * 2 + 1)
        logits += row * stride
        weights += row * (1 + TRIES) * groups
        heat = tl.load(temperature + (row if rows is None else tl.load(rows + row).to(tl.int64)))
        for block in range(part * steps, tl.minimum(part * steps + steps, tl.cdiv(groups, TILE))):
            x, weight = weights_of_block(logits, vocab, peaks + row * groups, block, best, heat, cut, TILE, GROUP)
            note_weights(weights, vocab, block, weight, TILE, GROUP)
            for attempt in tl.static_range(TRIES):
                own = tl.load(logits + tl.load(tries + row * TRIES + attempt)).to(tl.float32)
                note_weights(weights + (1 + attempt) * groups, vocab, block, tl.where(x > own, weight, 0.0), TILE, GROUP)


@triton.jit
def _draw_again(
    logits, vocab, peaks, groups, weights, weight, best, heat, cut, above, wanted, key, where, which,
    GROUP: tl.constexpr, PLACES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """A token that the filters keep, of those with logits > above; `weight`: theirs, by groups. weights: memory for others."""
    places = tl.arange(0, PLACES)
    attempt = TRIES
    token = -1
    while token < 0:
        found = draw(logits, vocab, exact_log(weight), best, heat, cut, above, key, where, which, attempt, GROUP, PLACES)
        above = tl.load(logits + found).to(tl.float32)
        if wanted < INF:
            for block in range(tl.cdiv(groups, MANY)):
                x, some = weights_of_block(logits, vocab, peaks, block, best, heat, cut, MANY, GROUP)
                note_weights(weights, vocab, block, tl.where(x > above, some, 0.0), MANY, GROUP)
            tl.debug_barrier()  # the weights are there for every thread
            weight = tl.load(weights + places, mask=places < groups, other=0.0)
            tl.debug_barrier()  # and are overwritten only then
            token = tl.where(tl.sum(weight, 0) < wanted, found, token)
        else:
            token = found
        attempt += 1
    return token


@triton.jit
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
    state,
    tries,
    weights,
    tokens,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tokens of rows that are not settled."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(state + row * 2)
    if cut >= 0.0:
        best = tl.load(state + row * 2 + 1)
        logits += row * stride
        weights += row * (1 + TRIES) * groups
        line = row if rows is None else tl.load(rows + row).to(tl.int64)
        heat = tl.load(temperature + line)
        places = tl.arange(0, PLACES)
        wanted = INF
        if top_p is not None:
            p = tl.load(top_p + line)
            if p < 1.0:
                total = tl.sum(tl.load(weights + places, mask=places < groups, other=0.0), 0)
                wanted = tl.maximum(total * p, 1e-30)  # the best token always stays
        above = -INF
        token = tl.full([], -1, tl.int32)
        weight = tl.zeros([PLACES], tl.float32)
        for attempt in range(TRIES):
            found = tl.load(tries + row * TRIES + attempt)
            x = tl.load(logits + found).to(tl.float32)
            better = tl.load(weights + (1 + attempt) * groups + places, mask=places < groups, other=0.0)
            stays = (distance_of(x, best, heat) <= cut) & (tl.sum(better, 0) < wanted)
            token = tl.where((token < 0) & stays, found, token)
            weight = tl.where(x > above, better, weight)
            above = tl.maximum(above, x)
        if token < 0:
            key, where, which = draw_key(row, line, seed, position, more, choice)
            token = _draw_again(
                logits, vocab, peaks + row * groups, groups, weights, weight, best, heat, cut, above, wanted, key, where, which,
                GROUP, PLACES, MANY,
            )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
