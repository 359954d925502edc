"""Log-probs, in plain torch.

n lines of logits, V vocabulary size, R rows of the request table. Tokens are ordered by their logit, the largest first, and among equals by
their id, the lowest first; a token's rank is its place in that order, from 1.
"""

from __future__ import annotations

import torch

from modelrunner.kernels.sampling.reference import (
    GREEDY_TEMPERATURE,
    MAX_ELEMENTS,
    MAX_ELEMENTS_ELSEWHERE,
    filter_cut,
    greedy,
    scaled_distance,
)

ID_BITS = 32  # of a key
LAST_ID = 2**31 - 1
NO_TOKEN = -1

Ranked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, num_top: int) -> Ranked:
    """Rank and log-prob of a chosen token of each line, and the likeliest tokens with theirs: logits less the log of the sum of their exp.

    logits: [n, V] of any float dtype; -inf is a token that cannot come, whose log-prob is -inf. chosen: [n] int64 in [0, V).
    rows: [n] int32, of the request table. wanted: [R] int32, how many of the likeliest tokens a row wants, at most `num_top`; a negative
    number: nothing at all. num_top: at most V.
    Returns ranks [n] int32, ids [n, 1 + num_top] int32 and logprobs [n, 1 + num_top] float32: the chosen token, then the likeliest. Where
    nothing is wanted: 0, -1 and 0.
    """
    n, vocab = logits.shape
    at_once = max(1, MAX_ELEMENTS.get(logits.device.type, MAX_ELEMENTS_ELSEWHERE) // vocab)
    if n > at_once:
        cuts = [slice(a, a + at_once) for a in range(0, n, at_once)]
        parts = [token_logprobs(logits[cut], chosen[cut], rows[cut], wanted, num_top) for cut in cuts]
        ranks, ids, values = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return ranks, ids, values
    x = logits.float()
    keys = order_keys(x)
    own = keys.gather(1, chosen.unsqueeze(1))
    ranks = 1 + (keys > own).sum(1)
    ids = torch.cat([chosen.unsqueeze(1), LAST_ID - (keys.topk(num_top, dim=1).values & LAST_ID)], 1)
    values = log_softmax(x).gather(1, ids)
    count = wanted[rows.long()].unsqueeze(1)
    given = torch.arange(1 + num_top, device=x.device) <= count
    ids, values = torch.where(given, ids, NO_TOKEN), torch.where(given, values, 0.0)
    return torch.where(count.squeeze(1) >= 0, ranks, 0).to(torch.int32), ids.to(torch.int32), values


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """x - log(sum(exp(x))) of each line, [n, V] float32. A line of -inf stays as it is."""
    best = x.amax(1, keepdim=True)
    shifted = x - torch.where(best == -torch.inf, 0.0, best)
    total = shifted.exp().sum(1, keepdim=True)
    return shifted - torch.where(total == 0.0, 1.0, total).log()


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """A different integer for each token of a line, the larger the earlier it comes: [n, V] int64. x: float32."""
    bits = torch.where(x == 0.0, 0.0, x).view(torch.int32)  # -0.0 is as good as 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ LAST_ID).long()
    return (ordered << ID_BITS) | (LAST_ID - torch.arange(x.shape[1], device=x.device))


def processed_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """What a token is drawn from, up to a constant a line: [n, V] float32, -inf for tokens that the filters drop.

    Arguments as those of `sampling.sample`. Lines with temperature <= 1e-4 are neither divided nor filtered.
    """
    n, vocab = logits.shape
    at_once = max(1, MAX_ELEMENTS.get(logits.device.type, MAX_ELEMENTS_ELSEWHERE) // vocab)
    if n > at_once:
        arguments = (logits, temperature, top_k, top_p, min_p)
        cuts = [slice(a, a + at_once) for a in range(0, n, at_once)]
        return torch.cat([processed_logits(*(None if a is None else a[cut] for a in arguments)) for cut in cuts])  # type: ignore[arg-type]
    distance = scaled_distance(logits, greedy(logits)[0], temperature)
    cut = filter_cut(distance, top_k, top_p, min_p)
    if cut is None:
        return -distance
    keeps = torch.where(temperature <= GREEDY_TEMPERATURE, torch.inf, cut)
    return torch.where(distance > keeps.unsqueeze(1), -torch.inf, -distance)
