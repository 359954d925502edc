"""What one program finds out about one row of logits: a token, a count, a mass, a cut. Device functions, used by `settle.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.sampling import reference
from modelrunner.kernels.sampling.noise import exact_exp, gumbel, random_words, random_words_of
from modelrunner.kernels.sampling.scan import INF, PURPOSE, place_of

SLACK = tl.constexpr(2.0**-10)  # bounds are good to 2e-5
MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
NO_MASS = tl.constexpr(28.0)  # exp(-28) is below 2^-40: a token at this distance has no mass
INF_BITS = tl.constexpr(0x7F800000)
NOWHERE = tl.constexpr(0x7FFFFFFF)
ROUNDED = tl.constexpr(18)  # bits of a bound that may be anything
FEW = tl.constexpr(256)  # tokens of a list that are compared each with each
OTHERS = tl.constexpr(16)  # at a time


@triton.jit
def distance_of(x, best, heat):
    return tl.math.div_rn(best - x, heat)


@triton.jit
def bits_of(distance):
    """Distances are never negative, so they order as their bits do."""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def distance_from(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mass_of(distance):
    return (exact_exp(-distance) * MASS_UNIT).to(tl.int64)


@triton.jit
def load_chunk(logits, vocab, start, COUNT: tl.constexpr):
    """Ids and logits of COUNT tokens, -inf beyond the vocabulary."""
    ids = start + tl.arange(0, COUNT)
    return ids, tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)


@triton.jit
def distance_at(logits, token, best, heat):
    return distance_of(tl.load(logits + token).to(tl.float32), best, heat)


@triton.jit
def best_token(logits, vocab, places, peaks, best, CHUNK: tl.constexpr):
    """The lowest id that holds the row's best logit (or NaN)."""
    ids, x = load_chunk(logits, vocab, place_of(peaks, best, places) * CHUNK, CHUNK)
    return tl.minimum(place_of(x, best, ids), vocab - 1)


@triton.jit
def draw(logits, vocab, places, bounds, best, heat, cut, below, seed, position, choice, CHUNK: tl.constexpr):
    """The token of the largest noise - distance, the lowest id among equals, of those at a distance <= cut and < below.

    Chunks are looked at in the order of their bounds, until no bound reaches what was found.
    """
    found = -INF
    token = 0
    top = tl.max(bounds, 0)
    while (top > -INF) & (top + SLACK >= found):
        chunk = tl.min(tl.where(bounds == top, places, NOWHERE), 0)
        ids, x = load_chunk(logits, vocab, chunk * CHUNK, CHUNK)
        distance = distance_of(x, best, heat)
        words = random_words(seed, position, choice, PURPOSE, chunk * CHUNK, CHUNK)
        noisy = tl.where((distance <= cut) & (distance < below), gumbel(words) - distance, -INF)
        value = tl.max(noisy, 0)
        first = tl.min(tl.where(noisy == value, ids, NOWHERE), 0)
        better = (value > found) | ((value == found) & (first < token))
        token = tl.where(better & (value > -INF), first, token)
        found = tl.maximum(found, value)
        bounds = tl.where(places == chunk, -INF, bounds)
        top = tl.max(bounds, 0)
    return token


@triton.jit
def count_row(logits, vocab, best, heat, limit, WIDE: tl.constexpr):
    """How many tokens of the row are at a distance of at most `limit` (bits of one)."""
    count = tl.zeros([WIDE], tl.int32)
    for start in range(0, vocab, WIDE):
        ids, x = load_chunk(logits, vocab, start, WIDE)
        count += ((bits_of(distance_of(x, best, heat)) <= limit) & (ids < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def kth_of_row(logits, vocab, best, heat, k, WIDE: tl.constexpr):
    """The distance of the row's k-th best token, by bisection over all logits."""
    low, high = 0, INF_BITS
    while low < high:
        middle = low + (high - low) // 2
        enough = count_row(logits, vocab, best, heat, middle, WIDE) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return distance_from(low)


@triton.jit
def weigh_row(logits, vocab, peaks, best, heat, cut, below, CHUNK: tl.constexpr):
    """The mass of the row's tokens at a distance <= cut and < below, an integer. peaks: a pointer to the row's."""
    mass = tl.zeros([CHUNK], tl.int64)
    for chunk in range(tl.cdiv(vocab, CHUNK)):
        nearest = distance_of(tl.load(peaks + chunk), best, heat)
        if (nearest <= cut) & (nearest < below) & (nearest < NO_MASS):
            _, x = load_chunk(logits, vocab, chunk * CHUNK, CHUNK)
            distance = distance_of(x, best, heat)
            mass += tl.where((distance <= cut) & (distance < below), mass_of(distance), 0)
    return tl.sum(mass, 0)


@triton.jit
def mass_of_row(logits, vocab, best, heat, limit, WIDE: tl.constexpr):
    """The mass of the row's tokens at a distance of at most `limit` (bits of one), an integer."""
    mass = tl.zeros([WIDE], tl.int64)
    for start in range(0, vocab, WIDE):
        _, x = load_chunk(logits, vocab, start, WIDE)
        distance = distance_of(x, best, heat)
        mass += tl.where(bits_of(distance) <= limit, mass_of(distance), 0)
    return tl.sum(mass, 0)


@triton.jit
def nucleus_of_row(logits, vocab, best, heat, cut, p, WIDE: tl.constexpr):
    """The distance at which top-p cuts the row's tokens at a distance <= cut, by bisection over all logits."""
    low, high = 0, bits_of(tl.minimum(cut, NO_MASS))
    wanted = wanted_mass(mass_of_row(logits, vocab, best, heat, high, WIDE), p)
    while low < high:
        middle = low + (high - low) // 2
        enough = mass_of_row(logits, vocab, best, heat, middle, WIDE) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return distance_from(low)


@triton.jit
def wanted_mass(total, p):
    """The mass that top-p asks for, at least 1."""
    share = tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(share, 1), total)


@triton.jit
def cut_of(bits, weight, wanted, high):
    """The smallest b such that the elements with bits <= b weigh at least `wanted`; `high` if there is none below it."""
    low = 0
    while low < high:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(bits <= middle, weight, 0), 0) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def shortlist(
    logits,
    vocab,
    group_peaks,
    groups,
    scratch,
    best,
    heat,
    k,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """Writes the ids of tokens among which the k best are, without a look at the other groups: the k-th best of the groups' peaks, rounded
    up to 5 bits, bounds the k-th best token. scratch: [GROUPS + 2 LIST] int32 of the row; the ids lie from GROUPS on, then the bits of the
    tokens' distances.

    Returns how many there are (more than LIST: the list is incomplete) and the bound, bits of a distance.
    """
    places = tl.arange(0, GROUPS)
    nearest = bits_of(distance_of(tl.load(group_peaks + places, mask=places < groups, other=-INF), best, heat))
    coarse = cut_of(nearest >> ROUNDED, tl.full([GROUPS], 1, tl.int32), k, tl.full([], INF_BITS >> ROUNDED, tl.int32))
    limit = tl.minimum(((coarse + 1) << ROUNDED) - 1, INF_BITS)
    chosen = ((nearest <= limit) & (nearest < INF_BITS)).to(tl.int32)
    many = tl.sum(chosen, 0)
    tl.store(scratch + tl.cumsum(chosen, 0) - 1, places, mask=chosen > 0)
    tl.debug_barrier()
    count = 0
    for start in range(0, many, TILE):
        slots = start + tl.arange(0, TILE)
        group = tl.load(scratch + slots, mask=slots < many, other=groups)
        ids = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [TILE * GROUP])
        x = tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32)
        bits = bits_of(distance_of(x, best, heat))
        kept = ((bits <= limit) & (bits < INF_BITS)).to(tl.int32)
        place = count + tl.cumsum(kept, 0) - 1
        fits = (kept > 0) & (place < LIST)
        tl.store(scratch + GROUPS + place, ids, mask=fits)
        tl.store(scratch + GROUPS + LIST + place, bits, mask=fits)
        count += tl.sum(kept, 0)
    tl.debug_barrier()
    return count, limit


@triton.jit
def cut_of_few(own, count, cut, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """`cut_of_list` of at most FEW tokens: each counts and weighs the tokens that are closer."""
    slots = tl.arange(0, FEW)
    listed = slots < count
    bits = tl.load(own + LIST + slots, mask=listed, other=INF_BITS)
    distance = distance_from(bits)
    closer = tl.zeros([FEW], tl.int32)
    heavier = tl.zeros([FEW], tl.int64)
    for start in range(0, count, OTHERS):
        others = start + tl.arange(0, OTHERS)
        theirs = tl.load(own + LIST + others, mask=others < count, other=INF_BITS)
        ahead = theirs[None, :] < bits[:, None]
        closer += tl.sum(ahead.to(tl.int32), 1)
        if p < 1.0:
            mass = tl.where(others < count, mass_of(distance_from(theirs)), 0)
            heavier += tl.sum(tl.where(ahead, mass[None, :], 0), 1)
    keep = listed & (closer < k) & (distance <= cut)
    if p < 1.0:
        keep = keep & (heavier < wanted_mass(tl.sum(tl.where(keep, mass_of(distance), 0), 0), p))
    return tl.max(tl.where(keep, distance, 0.0), 0)


@triton.jit
def cut_of_many(own, count, cut, limit, k, p, LIST: tl.constexpr):
    """`cut_of_list` by bisection."""
    slots = tl.arange(0, LIST)
    listed = slots < count
    bits = tl.load(own + LIST + slots, mask=listed, other=INF_BITS)
    cut = tl.minimum(cut, distance_from(cut_of(bits, tl.where(listed, 1, 0), k, limit)))
    if p < 1.0:
        distance = distance_from(bits)
        mass = tl.where(distance <= cut, mass_of(distance), 0)
        wanted = wanted_mass(tl.sum(mass, 0), p)
        cut = tl.minimum(cut, distance_from(cut_of(bits, mass, wanted, limit)))
    return cut


@triton.jit
def cut_of_list(own, count, cut, limit, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """The distance at which top-k and top-p cut listed tokens. own: where `shortlist` put their ids, and LIST further their distances.
    cut: of min-p. limit: bits of a distance that none of them exceeds."""
    found = cut_of_few(own, count, cut, k, p, LIST, FEW, OTHERS) if count <= FEW else cut_of_many(own, count, cut, limit, k, p, LIST)
    return found


@triton.jit
def draw_listed(own, count, cut, seed, position, choice, LIST: tl.constexpr, SIZE: tl.constexpr):
    """The draw among listed tokens, at most SIZE, at a distance <= cut."""
    slots = tl.arange(0, SIZE)
    listed = slots < count
    ids = tl.load(own + slots, mask=listed, other=0)
    distance = distance_from(tl.load(own + LIST + slots, mask=listed, other=INF_BITS))
    noisy = tl.where(listed & (distance <= cut), gumbel(random_words_of(seed, position, choice, PURPOSE, ids)) - distance, -INF)
    return tl.min(tl.where(listed & (noisy == tl.max(noisy, 0)), ids, NOWHERE), 0)
