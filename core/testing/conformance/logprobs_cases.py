"""Cases for the operations that give log-probs: ties, tokens that cannot come, lines that want nothing, few, or the whole vocabulary."""

from __future__ import annotations

from typing import Any

import torch


def token_logprobs(ops: Any, draw: Any, lines: int, vocab: int, num_top: int, kind: str) -> Any:
    """kind: `normal` logits; `coarse`, of few different values; `flat`, all equal; `masked`, of which few can come, in one line none."""
    num_top = min(num_top, vocab)
    logits = draw.noise(lines, vocab + 3)[:, :vocab]
    if kind == "coarse":
        logits = (logits * 2).round() / 2
    elif kind == "flat":
        logits = torch.zeros_like(logits)
        logits[:, ::2] *= -1  # -0.0, which is as good
    elif kind == "masked":
        allowed = draw.uniform(lines, vocab) < 4 / vocab
        allowed[:, vocab // 2] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
        logits[-1] = -torch.inf
    kept = logits.clone()
    table = lines + 3
    rows = torch.randperm(table, generator=draw.generator)[:lines].to(draw.device, torch.int32)
    wanted = draw.integers(-1, num_top + 1, table, dtype=torch.int32)
    wanted[rows[0].long()] = num_top
    chosen = draw.integers(0, vocab, lines)
    ranks, ids, values = ops.token_logprobs(logits, chosen, rows, wanted, num_top)
    return ranks, ids, values, torch.where(logits == kept, 0.0, 1.0)


def processed_logits(ops: Any, draw: Any, lines: int, vocab: int, filters: str) -> Any:
    """filters: `none`; `few`, of which top-k keeps less than ten or all; `many`, hundreds; `coarse`, few among logits many of which are
    equal; `p`, top-p alone."""
    logits = draw.noise(lines, vocab + 3)[:, :vocab] * 3
    logits = (logits / 4).round() * 4 if filters == "coarse" else logits
    logits[:, vocab // 2 :: 7] = -torch.inf
    kept = logits.clone()
    temperature = torch.where(draw.uniform(lines) < 0.3, 0.0, 0.3 + draw.uniform(lines))
    low, high = (200, 1500) if filters == "many" else (0, 9)
    top_k, top_p = draw.integers(low, high, lines, dtype=torch.int32), 0.5 + 0.5 * draw.uniform(lines)
    given = {"none": (None, None, None), "p": (None, top_p, None)}.get(filters, (top_k, top_p, 0.1 * draw.uniform(lines)))
    return ops.processed_logits(logits, temperature, *given), torch.where(logits == kept, 0.0, 1.0)


SIZES = ((1, 5), (5, 70), (3, 4100))
KINDS = ("normal", "coarse", "flat", "masked")
LOGPROBS_CASES: dict[str, tuple[Any, Any]] = {
    "token_logprobs": (token_logprobs, tuple((*size, top, kind) for size in SIZES for top in (0, 7, 20) for kind in KINDS)),
    "processed_logits": (processed_logits, tuple((*size, filters) for size in SIZES for filters in ("none", "few", "many", "coarse", "p"))),
}
