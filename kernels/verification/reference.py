"""Verification of drafted tokens, in plain torch.

N rows of the step, k draft tokens of a row at most, V vocabulary size, R rows of the request table, L longest request. A row has S = 1 + k
lines of logits: line 0 comes after the row's last known token, line j after its j-th draft.

With q = 1 at the draft, which is what a drafter without probabilities proposes, rejection sampling (Leviathan et al. 2023,
arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318, algorithm 2) accepts a draft d with probability p(d), and puts a token
drawn from p without d in its place otherwise. One draw t from p does both: accept if t = d, else t is drawn from p without d. So a line
draws what it would draw without a drafter, by the same noise, and a seeded request has the same tokens with every drafter and with none.
"""

from __future__ import annotations

import torch

from modelrunner.kernels.logprobs.reference import processed_logits
from modelrunner.kernels.sampling.philox import PURPOSE_ACCEPT, PURPOSE_RECOVER, gumbel_noise, uniform_noise
from modelrunner.kernels.sampling.reference import GREEDY_TEMPERATURE, greedy, sample

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def verify_drafts(
    logits: torch.Tensor,
    rows: torch.Tensor,
    samples: torch.Tensor,
    computed: torch.Tensor,
    query_len: torch.Tensor,
    token_ids: torch.Tensor,
    slots: int,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    choice: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    typical: tuple[float, float] | None = None,
) -> Result:
    """Choose the tokens of rows with drafts: the accepted ones and, after them, a token in place of the first rejected one or one more.

    logits: [N * S, V], a row's S = slots = 1 + k lines one after the other; what follows is of lines. rows: [N * S] int32. samples: [N * S]
    bool, the lines that count, of each row the first ones. computed, query_len: [N * S] int32; their sum is the position of the line's
    token, and there, in token_ids [R, L] int32, lies the draft that the next line, if it counts, has ahead.
    temperature, top_k, top_p, min_p, seed, choice: columns [R] as `sampling.sample` takes them for its rows; temperature None: all rows are
    greedy. A greedy row accepts a draft that is the best token.
    draft_probs: [N, k, V] float32, what each draft was drawn from, by noise of PURPOSE_DRAFT at its position. Then it is accepted with
    probability min(1, p / q), p being what `sample` draws from, and replaced by a token drawn from max(p - q, 0) otherwise; each of the two
    draws has a noise of its own.
    typical: (threshold, factor). Then rows that are not greedy accept a draft also if p > min(threshold, factor * exp(-entropy of p))
    (Cai et al. 2024, arXiv:2401.10774, section 3.3.1), which changes the distribution; draft_probs are not looked at.
    Returns tokens [N, S] int64, of which the first num_tokens [N] int32 count (0 where the row does not sample or is not ok), and ok [N]
    bool, as `greedy` says it of line 0. A later line of which it would be False ends the run before it.
    """
    k = slots - 1
    position, line = computed + query_len, rows.long()
    if temperature is None:
        flat, good = greedy(logits)
    else:
        kinds = [None if column is None else column[line] for column in (top_k, top_p, min_p)]
        flat, good = sample(logits, temperature[line], kinds[0], kinds[1], kinds[2], seed[line], position, choice[line])
    tokens, good, counting = flat.view(-1, slots), good.view(-1, slots), samples.view(-1, slots)
    ahead = token_ids[line, position.clamp(max=token_ids.shape[1] - 1).long()].view(-1, slots)[:, :k]
    drafts = torch.where(counting[:, 1:], ahead, -1)
    accepted = tokens[:, :k] == drafts
    if temperature is not None and k and (draft_probs is not None or typical is not None):
        judged, (lines, places) = logits.unflatten(0, (-1, slots)), (t.view(-1, slots)[:, :k].flatten() for t in (line, position))
        columns = (temperature, top_k, top_p, min_p, seed, choice)
        likely, own = _judge(judged[:, :k].flatten(0, 1), drafts, lines, places, columns, None if typical else draft_probs, typical)
        draws = (temperature[line] > GREEDY_TEMPERATURE).view(-1, slots)[:, :k]
        accepted = torch.where(draws, likely | (accepted if typical else False), accepted)
        own = torch.where(draws & (own >= 0), own, tokens[:, :k])
        tokens = torch.cat((torch.where(accepted, drafts, own), tokens[:, k:]), 1)
    going = torch.cat((counting[:, :1], accepted & good[:, :k]), 1).cumprod(1)
    return tokens, (going * good).sum(1).to(torch.int32), good[:, 0].contiguous()


def _judge(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    line: torch.Tensor,
    position: torch.Tensor,
    columns: tuple[torch.Tensor | None, ...],
    draft_probs: torch.Tensor | None,
    typical: tuple[float, float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that draw: which drafts are likely enough, [N, k] bool, and what comes in the place of one that is not, [N, k] int64.

    -1 for no draft and for the line's ordinary token. logits: [N * k, V], of the lines that a draft may follow. line, position: [N * k].
    columns: temperature, filters, seed and choice, [R].
    """
    n, k = drafts.shape
    *filters, seed, choice = (None if column is None else column[line] for column in columns)
    assert filters[0] is not None
    assert seed is not None
    assert choice is not None
    chances = processed_logits(logits, filters[0], filters[1], filters[2], filters[3]).softmax(-1)
    at = drafts.clamp(min=0).long().view(-1, 1)
    own = chances.gather(1, at).view(n, k)
    if draft_probs is None:
        entropy = -(chances * chances.log().clamp(min=-1e30)).sum(-1).view(n, k)
        threshold, factor = typical or (0.0, 0.0)
        return (drafts >= 0) & (own > (-entropy).exp().mul(factor).clamp(max=threshold)), torch.full_like(drafts, -1)
    keys, proposed = (seed, position, choice), draft_probs.flatten(0, 1)
    coin = uniform_noise(*keys, PURPOSE_ACCEPT, 1).view(n, k)
    # A line without a draft has no q: its token is the ordinary one.
    surplus = (chances - proposed).masked_fill_((drafts < 0).view(-1, 1), 0.0).clamp_(min=0.0)
    best, place = surplus.log_().add_(gumbel_noise(*keys, PURPOSE_RECOVER, chances.shape[1])).max(-1)
    return (drafts >= 0) & (coin * proposed.gather(1, at).view(n, k) < own), torch.where(best > -torch.inf, place, -1).view(n, k)
