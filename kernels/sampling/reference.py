"""Choosing tokens from logits, in plain torch.

A row's result depends on its own logits, parameters, seed and position only: never on its neighbours, its place, or the number of rows. To
that end sums over the vocabulary are integer sums, which no order of adding changes. Logits are read, never written. n rows, V vocabulary
size.
"""

from __future__ import annotations

import torch

from modelrunner.kernels.sampling.philox import PURPOSE_SAMPLE, gumbel_noise

GREEDY_TEMPERATURE = 1e-4  # up to here a row takes its best token, and among equals the lowest id
MASS_UNIT = 2.0**40  # probability masses are counted in 2^-40 of the best token's; 2^22 tokens fit an int64
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
    """Draw a token per row: temperature, then min-p, top-k and top-p (see `filter_cut`), then the best of logits + Gumbel noise.

    logits: [n, V]. temperature, top_p, min_p: [n] float32; top_k: [n] int32; seed: [n] int64; position (of the token drawn), choice: [n]
    integers.
    A filter given as None is off for all rows. Rows with temperature <= 1e-4 take the greedy token. uniforms: see `gumbel_noise`.
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
    scores = scaled_distance(logits, best_token, temperature)
    cut = filter_cut(scores, top_k, top_p, min_p)
    noise = gumbel_noise(seed, position, choice, PURPOSE_SAMPLE, vocab, uniforms)
    noisy = noise.sub_(scores) if cut is None else noise.sub_(scores).masked_fill_(scores > cut.unsqueeze(1), -torch.inf)
    return torch.where((temperature <= GREEDY_TEMPERATURE) | ~ok, best_token, noisy.argmax(-1)), ok


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
    vocab = distance.shape[1]
    bits = distance.view(torch.int32)  # non-negative floats order as their bits do
    cut: torch.Tensor | None = None
    if min_p is not None:
        cut = (-min_p.log()).clamp(min=0.0)
    if top_k is not None:
        wanted = torch.where(top_k <= 0, vocab, top_k.clamp(max=vocab)).long()
        kth = _cut_at(bits, None, wanted)
        cut = kth if cut is None else torch.minimum(cut, kth)
    if top_p is not None:
        mass = distance.neg().exp_().mul_(MASS_UNIT)
        if cut is not None:
            mass = mass.masked_fill_(distance > cut.unsqueeze(1), 0.0)
        mass = mass.to(torch.int64)
        total = mass.sum(-1)
        wanted = torch.minimum((total.double() * top_p.double()).ceil().long().clamp_(min=1), total)
        nucleus = torch.where(top_p >= 1.0, torch.inf, _cut_at(bits, mass, wanted))
        cut = nucleus if cut is None else torch.minimum(cut, nucleus)
    return cut


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
