"""What one program finds out about one row of logits: a token, a count, a mass, a cut. Device functions, used by `settle.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.sampling import philox, reference
from modelrunner.kernels.sampling.noise import exact_exp, gumbel, random_words, random_words_of
from modelrunner.kernels.sampling.scan import INF, place_of

PURPOSE = tl.constexpr(philox.PURPOSE_SAMPLE)
PURPOSE_GROUP = tl.constexpr(philox.PURPOSE_GROUP)
ATTEMPT = tl.constexpr(philox.ATTEMPT)
MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
NO_MASS = tl.constexpr(28.0)  # exp(-28) is below 2^-40: a token at this distance has no mass
INF_BITS = tl.constexpr(0x7F800000)
NOWHERE = tl.constexpr(0x7FFFFFFF)
ROUNDED = tl.constexpr(18)  # bits of a bound that may be anything
TIED = tl.constexpr(16)  # gaps so close together may be one distance
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
def best_token(logits, vocab, places, peaks, best, GROUP: tl.constexpr):
    """The lowest id that holds the row's best logit (or NaN)."""
    ids, x = load_chunk(logits, vocab, place_of(peaks, best, places) * GROUP, GROUP)
    return tl.minimum(place_of(x, best, ids), vocab - 1)


@triton.jit
def draw(logits, vocab, likely, best, heat, cut, below, seed, position, choice, attempt, GROUP: tl.constexpr, PLACES: tl.constexpr):
    """A token at a distance <= cut and < below, of a group drawn by the logarithms of masses [PLACES]; see `reference._draw_once`."""
    places = tl.arange(0, PLACES)
    noisy = likely + gumbel(random_words(seed, position, choice, PURPOSE_GROUP + ATTEMPT * attempt, 0, PLACES))
    group = tl.min(tl.where(noisy == tl.max(noisy, 0), places, NOWHERE), 0)
    ids, x = load_chunk(logits, vocab, group * GROUP, GROUP)
    distance = distance_of(x, best, heat)
    words = random_words(seed, position, choice, PURPOSE + ATTEMPT * attempt, group * GROUP, GROUP)
    noisy = tl.where((distance <= cut) & (distance < below), gumbel(words) - distance, -INF)
    return tl.minimum(tl.min(tl.where(noisy == tl.max(noisy, 0), ids, NOWHERE), 0), vocab - 1)


@triton.jit
def draw_row(logits, vocab, best, heat, cut, seed, position, choice, WIDE: tl.constexpr):
    """Of all tokens at a distance <= cut the one that its own noise puts first."""
    found = -INF
    token = 0
    for start in range(0, vocab, WIDE):
        ids, x = load_chunk(logits, vocab, start, WIDE)
        distance = distance_of(x, best, heat)
        words = random_words(seed, position, choice, PURPOSE, start, WIDE)
        noisy = tl.where((distance <= cut) & (distance < INF), gumbel(words) - distance, -INF)
        value = tl.max(noisy, 0)
        token = tl.where(value > found, tl.min(tl.where(noisy == value, ids, NOWHERE), 0), token)
        found = tl.maximum(found, value)
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
    low, high = tl.full([], 0, tl.int32), tl.full([], INF_BITS, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        enough = count_row(logits, vocab, best, heat, middle, WIDE) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return distance_from(low)


@triton.jit
def weigh_block(logits, vocab, nearest, block, best, heat, cut, below, lighter, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Of BLOCK tokens the mass of each that is at a distance <= cut, [BLOCK] int64, and to `lighter`, a pointer, those that are also
    closer than `below`, added up by groups. nearest: the distances of the groups."""
    mass = tl.zeros([BLOCK], tl.int64)
    closer = tl.zeros([BLOCK // GROUP], tl.int64)
    if tl.min(nearest, 0) <= tl.minimum(cut, NO_MASS):
        _, x = load_chunk(logits, vocab, block * BLOCK, BLOCK)
        distance = distance_of(x, best, heat)
        mass = tl.where(distance <= cut, mass_of(distance), 0)
        closer = tl.sum(tl.reshape(tl.where(distance < below, mass, 0), [BLOCK // GROUP, GROUP]), 1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(lighter + group, closer, mask=group * GROUP < vocab)
    return mass


@triton.jit
def nearest_of_block(peaks, vocab, block, best, heat, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The distances of a block's groups. peaks: a pointer to the row's."""
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    return distance_of(tl.load(peaks + group, mask=group * GROUP < vocab, other=-INF), best, heat)


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
    low, high = tl.full([], 0, tl.int32), bits_of(tl.minimum(cut, NO_MASS))
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
    low = tl.full([], 0, tl.int32)
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
    k,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    LIST: tl.constexpr,
):
    """Writes the ids of tokens among which the k best are, without a look at the other groups: the k-th best of the groups' peaks, rounded
    up to 5 bits, bounds the k-th best token. scratch: [GROUPS + 2 LIST] int32 of the row; the ids lie from GROUPS on, then the bits of the
    tokens' gaps to the best logit, which are not divided by a temperature yet.

    Returns how many there are (more than LIST: the list is incomplete).
    """
    places = tl.arange(0, GROUPS)
    gap = bits_of(best - tl.load(group_peaks + places, mask=places < groups, other=-INF))
    coarse = cut_of(gap >> ROUNDED, tl.full([GROUPS], 1, tl.int32), k, tl.full([], INF_BITS >> ROUNDED, tl.int32))
    limit = tl.minimum(((coarse + 1) << ROUNDED) + TIED, INF_BITS)
    chosen = ((gap <= limit) & (gap < INF_BITS)).to(tl.int32)
    many = tl.sum(chosen, 0)
    tl.store(scratch + tl.cumsum(chosen, 0) - 1, places, mask=chosen > 0)
    tl.debug_barrier()
    count = 0
    for start in range(0, many, TILE):
        slots = start + tl.arange(0, TILE)
        group = tl.load(scratch + slots, mask=slots < many, other=groups)
        ids = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [TILE * GROUP])
        bits = bits_of(best - tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32))
        kept = ((bits <= limit) & (bits < INF_BITS)).to(tl.int32)
        place = count + tl.cumsum(kept, 0) - 1
        fits = (kept > 0) & (place < LIST)
        tl.store(scratch + GROUPS + place, ids, mask=fits)
        tl.store(scratch + GROUPS + LIST + place, bits, mask=fits)
        count += tl.sum(kept, 0)
    tl.debug_barrier()
    return count


@triton.jit
def listed_distance(own, slots, count, heat, LIST: tl.constexpr):
    """The distances of listed tokens, infinite beyond the list. own: where `shortlist` put their ids."""
    return tl.math.div_rn(distance_from(tl.load(own + LIST + slots, mask=slots < count, other=INF_BITS)), heat)


@triton.jit
def cut_of_few(own, count, heat, cut, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """`cut_of_list` of at most FEW tokens: each counts and weighs the tokens that are closer."""
    slots = tl.arange(0, FEW)
    distance = listed_distance(own, slots, count, heat, LIST)
    closer = tl.zeros([FEW], tl.int32)
    heavier = tl.zeros([FEW], tl.int64)
    for start in range(0, count, OTHERS):
        theirs = listed_distance(own, start + tl.arange(0, OTHERS), count, heat, LIST)
        ahead = theirs[None, :] < distance[:, None]
        closer += tl.sum(ahead.to(tl.int32), 1)
        if p < 1.0:
            heavier += tl.sum(tl.where(ahead, mass_of(theirs)[None, :], 0), 1)
    keep = (slots < count) & (closer < k) & (distance <= cut)
    if p < 1.0:
        keep = keep & (heavier < wanted_mass(tl.sum(tl.where(keep, mass_of(distance), 0), 0), p))
    return tl.max(tl.where(keep, distance, 0.0), 0)


@triton.jit
def cut_of_many(own, count, heat, cut, k, p, LIST: tl.constexpr):
    """`cut_of_list` by bisection."""
    slots = tl.arange(0, LIST)
    distance = listed_distance(own, slots, count, heat, LIST)
    bits = bits_of(distance)
    limit = tl.max(tl.where(slots < count, bits, 0), 0)
    cut = tl.minimum(cut, distance_from(cut_of(bits, tl.where(slots < count, 1, 0), k, limit)))
    if p < 1.0:
        mass = tl.where(distance <= cut, mass_of(distance), 0)
        wanted = wanted_mass(tl.sum(mass, 0), p)
        cut = tl.minimum(cut, distance_from(cut_of(bits, mass, wanted, limit)))
    return cut


@triton.jit
def cut_of_list(own, count, heat, cut, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """The distance at which top-k and top-p cut listed tokens. own: where `shortlist` put their ids; cut: of min-p."""
    found = cut_of_few(own, count, heat, cut, k, p, LIST, FEW, OTHERS) if count <= FEW else cut_of_many(own, count, heat, cut, k, p, LIST)
    return found


@triton.jit
def draw_listed(own, count, heat, cut, seed, position, choice, LIST: tl.constexpr, SIZE: tl.constexpr):
    """The draw among listed tokens, at most SIZE, at a distance <= cut."""
    slots = tl.arange(0, SIZE)
    listed = slots < count
    ids = tl.load(own + slots, mask=listed, other=0)
    distance = listed_distance(own, slots, count, heat, LIST)
    noisy = tl.where(listed & (distance <= cut), gumbel(random_words_of(seed, position, choice, PURPOSE, ids)) - distance, -INF)
    return tl.min(tl.where(listed & (noisy == tl.max(noisy, 0)), ids, NOWHERE), 0)
