"""What one program finds out about one row of logits: a token, a count, a mass, a cut. Device functions, used by `settle.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.sampling import philox, reference
from modelrunner.kernels.sampling.noise import INTERPRETED, exact_exp, gumbel, random_words, random_words_of
from modelrunner.kernels.sampling.scan import INF, LOG2E, fast_exp2, place_of

PURPOSE = tl.constexpr(philox.PURPOSE_SAMPLE)
PURPOSE_GROUP = tl.constexpr(philox.PURPOSE_GROUP)
ATTEMPT = tl.constexpr(philox.ATTEMPT)
MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
NO_MASS = tl.constexpr(28.0)  # exp(-28) is below 2^-40: a token at this distance has no mass
INF_BITS = tl.constexpr(0x7F800000)
NOWHERE = tl.constexpr(0x7FFFFFFF)
ROUNDED = tl.constexpr(18)  # bits of a bound that may be anything
TIED = tl.constexpr(16)  # gaps so close together may be one distance
FEW = tl.constexpr(128)  # tokens of a list that are compared each with each
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
def draw(logits, vocab, likely, best, heat, cut, above, seed, position, choice, attempt, GROUP: tl.constexpr, PLACES: tl.constexpr):
    """A token at a distance <= cut whose logit is > above, of a group drawn by the logarithms of masses [PLACES]; see
    `reference._draw_once`."""
    places = tl.arange(0, PLACES)
    noisy = likely + gumbel(random_words(seed, position, choice, PURPOSE_GROUP + ATTEMPT * attempt, 0, PLACES))
    group = tl.min(tl.where(noisy == tl.max(noisy, 0), places, NOWHERE), 0)
    ids, x = load_chunk(logits, vocab, group * GROUP, GROUP)
    distance = distance_of(x, best, heat)
    words = random_words(seed, position, choice, PURPOSE + ATTEMPT * attempt, group * GROUP, GROUP)
    noisy = tl.where((distance <= cut) & (x > above), gumbel(words) - distance, -INF)
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
def weights_of_block(logits, vocab, peaks, block, best, heat, cut, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Logits of GROUPS groups of the row, and weights exp(-distance) of their tokens at a distance <= cut, [GROUPS, GROUP] each. Weights
    are added up by groups alone, so that no number of rows changes the order. peaks: a pointer to the row's."""
    group = block * GROUPS + tl.arange(0, GROUPS)
    nearest = distance_of(tl.load(peaks + group, mask=group * GROUP < vocab, other=-INF), best, heat)
    x = tl.full([GROUPS, GROUP], -INF, tl.float32)
    if tl.min(nearest, 0) <= tl.minimum(cut, NO_MASS):
        _, flat = load_chunk(logits, vocab, block * (GROUPS * GROUP), GROUPS * GROUP)
        x = tl.reshape(flat, [GROUPS, GROUP])
    weight = fast_exp2((x - best) * (LOG2E / heat))
    if cut < INF:
        weight = tl.where(distance_of(x, best, heat) <= cut, weight, 0.0)
    return x, weight


@triton.jit
def note_weights(out, vocab, block, weight, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The sums of groups' weights, to their places behind `out`."""
    group = block * GROUPS + tl.arange(0, GROUPS)
    tl.store(out + group, tl.sum(weight, 1), mask=group * GROUP < vocab)


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
def _put(where, word, mask):
    """`tl.store` of scattered words as they lie: the compiler would first exchange all addresses between the threads."""
    if INTERPRETED:
        tl.store(where, word, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred on; setp.ne.s32 on, $3, 0; @on st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [where.to(tl.int64), word, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    up to 5 bits, bounds the k-th best token. scratch: [GROUPS + LIST] int32 of the row; the ids lie from GROUPS on.

    Returns how many there are (more than LIST: the list is incomplete).
    """
    places = tl.arange(0, GROUPS)
    gap = bits_of(best - tl.load(group_peaks + places, mask=places < groups, other=-INF))
    coarse = cut_of(gap >> ROUNDED, tl.full([GROUPS], 1, tl.int32), k, tl.full([], INF_BITS >> ROUNDED, tl.int32))
    limit = tl.minimum(((coarse + 1) << ROUNDED) + TIED, INF_BITS)
    chosen = ((gap <= limit) & (gap < INF_BITS)).to(tl.int32)
    many = tl.sum(chosen, 0)
    _put(scratch + tl.cumsum(chosen, 0) - 1, places, chosen > 0)
    tl.debug_barrier()
    count = 0
    for start in range(0, many, TILE):
        slots = start + tl.arange(0, TILE)
        group = tl.load(scratch + slots, mask=slots < many, other=groups)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        bits = bits_of(best - tl.load(logits + ids, mask=ids < vocab, other=-INF).to(tl.float32))
        kept = ((bits <= limit) & (bits < INF_BITS)).to(tl.int32)
        many_of = tl.sum(kept, 1)
        place = (count + tl.cumsum(many_of, 0) - many_of)[:, None] + tl.cumsum(kept, 1) - 1
        _put(scratch + GROUPS + place, ids, (kept > 0) & (place < LIST))
        count += tl.sum(many_of, 0)
    tl.debug_barrier()
    return count


@triton.jit
def measure_listed(logits, own, count, best, heat, LIST: tl.constexpr):
    """Writes the distances of listed tokens, LIST behind their ids. own: where `shortlist` put these; count: at most LIST."""
    slots = tl.arange(0, LIST)
    ids = tl.load(own + slots, mask=slots < count, other=0)
    x = tl.load(logits + ids, mask=slots < count, other=-INF).to(tl.float32)
    tl.store(own + LIST + slots, bits_of(distance_of(x, best, heat)), mask=slots < count)
    tl.debug_barrier()


@triton.jit
def listed_distance(own, slots, count, LIST: tl.constexpr):
    """The distances of listed tokens, infinite beyond the list. own: see `measure_listed`."""
    return distance_from(tl.load(own + LIST + slots, mask=slots < count, other=INF_BITS))


@triton.jit
def cut_of_few(own, count, cut, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """`cut_of_list` of at most FEW tokens: each counts and weighs the tokens that are closer."""
    slots = tl.arange(0, FEW)
    distance = listed_distance(own, slots, count, LIST)
    ranks = tl.zeros([FEW, OTHERS], tl.int32)
    masses = tl.zeros([FEW, OTHERS], tl.int64)
    for start in range(0, count, OTHERS):
        theirs = listed_distance(own, start + tl.arange(0, OTHERS), count, LIST)
        ahead = theirs[None, :] < distance[:, None]
        ranks += ahead.to(tl.int32)
        masses += tl.where(ahead, mass_of(theirs)[None, :], 0)
    closer, heavier = tl.sum(ranks, 1), tl.sum(masses, 1)
    keep = (slots < count) & (closer < k) & (distance <= cut)
    if p < 1.0:
        keep = keep & (heavier < wanted_mass(tl.sum(tl.where(keep, mass_of(distance), 0), 0), p))
    return tl.max(tl.where(keep, distance, 0.0), 0)


@triton.jit
def cut_of_many(own, count, cut, k, p, LIST: tl.constexpr):
    """`cut_of_list` by bisection."""
    slots = tl.arange(0, LIST)
    distance = listed_distance(own, slots, count, LIST)
    bits = bits_of(distance)
    limit = tl.max(tl.where(slots < count, bits, 0), 0)
    cut = tl.minimum(cut, distance_from(cut_of(bits, tl.where(slots < count, 1, 0), k, limit)))
    if p < 1.0:
        mass = tl.where(distance <= cut, mass_of(distance), 0)
        wanted = wanted_mass(tl.sum(mass, 0), p)
        cut = tl.minimum(cut, distance_from(cut_of(bits, mass, wanted, limit)))
    return cut


@triton.jit
def cut_of_list(own, count, cut, k, p, LIST: tl.constexpr, FEW: tl.constexpr, OTHERS: tl.constexpr):
    """The distance at which top-k and top-p cut listed tokens. own: see `measure_listed`; cut: of min-p."""
    found = cut_of_few(own, count, cut, k, p, LIST, FEW, OTHERS) if count <= FEW else cut_of_many(own, count, cut, k, p, LIST)
    return found


@triton.jit
def draw_listed(own, count, cut, seed, position, choice, LIST: tl.constexpr, SIZE: tl.constexpr):
    """The draw among listed tokens, at most SIZE, at a distance <= cut."""
    slots = tl.arange(0, SIZE)
    listed = slots < count
    ids = tl.load(own + slots, mask=listed, other=0)
    distance = listed_distance(own, slots, count, LIST)
    noisy = tl.where(listed & (distance <= cut), gumbel(random_words_of(seed, position, choice, PURPOSE, ids)) - distance, -INF)
    return tl.min(tl.where(listed & (noisy == tl.max(noisy, 0)), ids, NOWHERE), 0)
