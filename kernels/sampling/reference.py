"""Choosing tokens from logits, in plain torch.

A row's result depends on its own logits, parameters, seed and position only: never on its neighbours, its place, or the number of rows. To
that end sums over the vocabulary are integer sums, which no order of adding changes. Logits are read, never written. n rows, V vocabulary
size.

A row draws in two steps: a group of GROUP neighbouring tokens by its mass, and a token of that group, each as the best of logarithms of
masses plus Gumbel noise. That is the distribution of one race of all tokens, with noise for V / GROUP + GROUP of them and not for V. Where
the filters drop it, TRIES tokens are drawn before one is drawn of those that are likelier than all of them, until the filters keep it. Rows
with a top-k up to SHORT_K race the few tokens they keep.
"""

from __future__ import annotations

import torch

from modelrunner.kernels.sampling.philox import ATTEMPT, PURPOSE_GROUP, PURPOSE_SAMPLE, gumbel, gumbel_noise, uniform_blocks

GREEDY_TEMPERATURE = 1e-4  # up to here a row takes its best token, and among equals the lowest id
MASS_UNIT = 2.0**40  # probability masses are counted in 2^-40 of the best token's; 2^22 tokens fit an int64
GROUP = 128  # tokens, of which one is drawn once their group is
# The mass of a group is counted in 2^-22 of its best token's; tokens below half of that, which weigh nothing when the group is drawn, have
# together less than 2^-15 of it.
GROUP_UNIT = 2.0**22
SHORT_K = 512
TRIES = 3
DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits): a 31-bit distance, highest digit first
SORTED_VOCAB = 4096  # up to here a sort costs less than histograms
MAX_ELEMENTS = {"cpu": 1 << 17}  # logits at a time, by device type: on a CPU the scratch memory should stay in the cache
MAX_ELEMENTS_ELSEWHERE = 1 << 24
BEST_BLOCK = 512  # tokens whose maximum is looked for at once


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row, the lowest id among equals. logits: [n, V] of any float dtype.

    Returns tokens [n] int64, always in [0, V), and ok [n] bool: False where the largest logit is not finite (all masked, +inf, or any NaN).
    """
    tokens = _first_largest(logits)
    best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, torch.isfinite(best)


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    """`argmax` of each row, by blocks: on a CPU the place of a maximum takes ten times as long to find as the maximum."""
    rows, vocab = logits.shape
    if rows == 0 or vocab % BEST_BLOCK:
        return logits.argmax(-1)
    blocks = logits.reshape(rows, vocab // BEST_BLOCK, BEST_BLOCK)
    block = blocks.amax(2).argmax(1)
    return block * BEST_BLOCK + blocks[torch.arange(rows, device=logits.device), block].argmax(1)


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
    """Draw a token per row: temperature, then min-p, top-k and top-p (see `filter_cut`), then by Gumbel noise, as the module says.

    logits: [n, V]. temperature, top_p, min_p: [n] float32; top_k: [n] int32; seed: [n] int64; position (of the token drawn), choice: [n]
    integers.
    A filter given as None is off for all rows. Rows with temperature <= 1e-4 take the greedy token. uniforms: see
    `gumbel_noise`; with them all rows race all of their tokens.
    Returns tokens [n] int64 and ok [n] bool, as `greedy` does.
    """
    n, vocab = logits.shape
    at_once = max(1, MAX_ELEMENTS.get(logits.device.type, MAX_ELEMENTS_ELSEWHERE) // vocab)
    if n > at_once:
        cuts = [slice(a, a + at_once) for a in range(0, n, at_once)]
        arguments = (logits, temperature, top_k, top_p, min_p, seed, position, choice, uniforms)
        parts = [sample(*(None if a is None else a[cut] for a in arguments)) for cut in cuts]  # type: ignore[arg-type]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([ok for _, ok in parts])
    best_token, ok = greedy(logits)
    distance = scaled_distance(logits, best_token, temperature)
    bound, cut = _cuts(distance, top_k, top_p, min_p)
    keys, draws = (seed, position, choice), (temperature > GREEDY_TEMPERATURE) & ok
    if uniforms is not None:
        noisy = gumbel_noise(*keys, PURPOSE_SAMPLE, vocab, uniforms).sub_(distance)
        tokens = (noisy if cut is None else noisy.masked_fill_(distance > cut.unsqueeze(1), -torch.inf)).argmax(-1)
    elif top_k is None or cut is None:
        tokens = _draw(distance, bound, cut, keys, draws)
    else:
        short = draws & (top_k > 0) & (top_k <= SHORT_K)
        tokens, others = _race(distance, torch.where(short, cut, -1.0), keys), draws & ~short
        if others.any():
            tokens = torch.where(short, tokens, _draw(distance, bound, cut, keys, others))
    return torch.where(draws, tokens, best_token), ok


Keys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # seed, position and choice, [n] each


def _rows_of(keys: Keys, row: torch.Tensor) -> Keys:
    seed, position, choice = keys
    return seed[row], position[row], choice[row]


def _race(distance: torch.Tensor, cut: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Of the tokens at a distance <= cut the one that its own noise puts first, [n]; 0 for a row without any."""
    row, token = torch.nonzero(distance <= cut.unsqueeze(1), as_tuple=True)
    numbers = uniform_blocks(_rows_of(keys, row), PURPOSE_SAMPLE, (token // 4).unsqueeze(1))
    noisy = gumbel(numbers.gather(1, (token % 4).unsqueeze(1)).squeeze(1)) - distance[row, token]
    first = torch.full_like(cut, -torch.inf).scatter_reduce_(0, row, noisy, "amax")
    beyond = distance.shape[1]
    found = torch.full(cut.shape, beyond, dtype=torch.int64, device=cut.device)
    found.scatter_reduce_(0, row, torch.where(noisy == first[row], token, beyond), "amin")
    return torch.where(found < beyond, found, 0)


def _draw(distance: torch.Tensor, bound: torch.Tensor | None, cut: torch.Tensor | None, keys: Keys, draws: torch.Tensor) -> torch.Tensor:
    """A token of each row at a distance <= cut, [n]. bound: of the filters but top-p. draws: [n] bool, the rows that count."""
    groups = _grouped(distance)
    nearest = groups.amin(2)
    base = torch.where(nearest < torch.inf, nearest, 0.0).unsqueeze(2)
    masses = (base - groups).exp_().mul_(GROUP_UNIT).round_().to(torch.int32).sum(2, dtype=torch.int32)
    likely = masses.float().log_().sub_(nearest)
    token = _draw_once(likely, groups, keys, 0)
    if cut is None:
        return token
    own = distance.gather(1, token.unsqueeze(1)).squeeze(1)
    closest, row, attempt = own.clone(), torch.nonzero(draws & (own > cut)).squeeze(1), 1
    while row.numel():
        chances, left = likely[row], groups[row]
        if attempt >= TRIES:
            dropped = distance[row] >= closest[row].unsqueeze(1)
            if bound is not None:
                dropped |= distance[row] > bound[row].unsqueeze(1)
            left = _grouped(distance[row].masked_fill_(dropped, torch.inf))
            chances = left.neg().exp_().mul_(MASS_UNIT).to(torch.int64).sum(2).float().log_()
        token[row] = _draw_once(chances, left, _rows_of(keys, row), attempt)
        own[row] = distance[row, token[row]]
        closest = torch.minimum(closest, own)
        row, attempt = row[own[row] > cut[row]], attempt + 1
    return token


def _grouped(distance: torch.Tensor) -> torch.Tensor:
    """[n, groups, GROUP], infinite beyond the vocabulary; one narrower group for a small vocabulary."""
    n, vocab = distance.shape
    size = min(GROUP, -(-vocab // 4) * 4)
    return torch.nn.functional.pad(distance, (0, -vocab % size), value=torch.inf).view(n, -1, size)


def _draw_once(likely: torch.Tensor, groups: torch.Tensor, keys: Keys, attempt: int) -> torch.Tensor:
    """A token [n] by distances [n, groups, size], of a group drawn by the logarithms of masses [n, groups]."""
    n, count, size = groups.shape
    if count > 1:
        likely = likely + gumbel_noise(*keys, PURPOSE_GROUP + ATTEMPT * attempt, count)
    group = likely.argmax(1, keepdim=True)
    block = group * (size // 4) + torch.arange(size // 4, device=group.device)
    noise = gumbel(uniform_blocks(keys, PURPOSE_SAMPLE + ATTEMPT * attempt, block))
    inside = groups[torch.arange(n, device=group.device), group.squeeze(1)]
    return group.squeeze(1) * size + noise.sub_(inside).argmax(1)


def scaled_distance(logits: torch.Tensor, best_token: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """How far each token is below the row's best, (best - logit) / temperature, [n, V] float32, never negative, inf where masked.

    Subtracting first keeps a small temperature from overflowing. Greedy rows are divided by 1.
    """
    divisor = torch.where(temperature <= GREEDY_TEMPERATURE, 1.0, temperature).unsqueeze(1)
    best = logits.gather(1, best_token.unsqueeze(1)).float()
    return (best - logits.float()).div_(divisor)


def filter_cut(
    distance: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> torch.Tensor | None:
    """The largest distance that the filters keep, [n] float32: a token stays if its distance <= the cut. None if no filter is given.

    distance: [n, V] of `scaled_distance`. min-p keeps tokens with at least min_p of the best one's probability. Of those, top-k keeps the k
    best (k <= 0: all). Of those, top-p keeps the fewest best ones that hold top_p of what probability is left (>= 1: all). Tokens that tie
    at a cut are all kept, so top-k can keep more than k. Every filter keeps the best token.
    """
    return _cuts(distance, top_k, top_p, min_p)[1]


def _cuts(
    distance: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The cut of min-p and top-k, and that of all three filters."""
    vocab = distance.shape[1]
    bits = distance.view(torch.int32)  # non-negative floats order as their bits do
    cut: torch.Tensor | None = None
    if min_p is not None:
        cut = (-min_p.log()).clamp(min=0.0)
    if top_k is not None:
        wanted = torch.where(top_k <= 0, vocab, top_k.clamp(max=vocab)).long()
        kth = _cut_at(bits, None, wanted)
        cut = kth if cut is None else torch.minimum(cut, kth)
    bound = cut
    if top_p is not None:
        mass = distance.neg().exp_().mul_(MASS_UNIT)
        if cut is not None:
            mass = mass.masked_fill_(distance > cut.unsqueeze(1), 0.0)
        mass = mass.to(torch.int64)
        total = mass.sum(-1)
        wanted = torch.minimum((total.double() * top_p.double()).ceil().long().clamp_(min=1), total)
        nucleus = torch.where(top_p >= 1.0, torch.inf, _cut_at(bits, mass, wanted))
        cut = nucleus if cut is None else torch.minimum(cut, nucleus)
    return bound, cut


def _cut_at(bits: torch.Tensor, weight: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """The smallest distance d of each row such that the elements at distance <= d weigh at least `wanted`, [n] float32.

    bits: [n, V] int32, bit patterns of distances. weight: [n, V] int64 >= 0, None for 1 each. wanted: [n] int64, from 1 to the row's
    weight. Both ways give the same bits; the vocabulary's size, which is the same for all rows of a model, decides between them.
    """
    found = (_cut_by_sort if bits.shape[1] <= SORTED_VOCAB else _cut_by_digits)(bits, weight, wanted)
    return found.to(torch.int32).view(torch.float32)


def _cut_by_sort(bits: torch.Tensor, weight: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    ordered, place = bits.sort(-1)
    first = wanted - 1 if weight is None else (weight.gather(1, place).cumsum(-1) < wanted.unsqueeze(1)).sum(-1)
    return ordered.gather(1, first.clamp(max=bits.shape[1] - 1).unsqueeze(1)).squeeze(1)


def _cut_by_digits(bits: torch.Tensor, weight: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """Radix selection: a histogram of each digit of the bits, from the highest down, of the elements that share the digits so far."""
    counted = torch.ones(bits.shape, dtype=torch.int64, device=bits.device) if weight is None else weight
    prefix = torch.zeros_like(wanted)
    for shift, size in DIGITS:
        digit = (bits >> shift).bitwise_and_((1 << size) - 1).long()
        histogram = torch.zeros(bits.shape[0], 1 << size, dtype=torch.int64, device=bits.device).scatter_add_(1, digit, counted)
        reached = histogram.cumsum(-1)
        bucket = (reached < wanted.unsqueeze(1)).sum(-1, keepdim=True).clamp_(max=(1 << size) - 1)
        wanted = wanted - (reached - histogram).gather(1, bucket).squeeze(1)
        prefix = (prefix << size) | bucket.squeeze(1)
        if shift:
            counted = counted * (digit == bucket)
    return prefix
