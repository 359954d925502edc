"""Cases for `verify_drafts`: drafts that hold to different lengths, rows that do not sample, slots in which nothing is finite."""

from __future__ import annotations

from typing import Any

import torch

LONGEST = 30


def verify_drafts(ops: Any, draw: Any, rows: int, slots: int, vocab: int, kind: str) -> Any:
    """kind: `greedy` without columns, `plain`, `filtered`, and for `probs`, `filtered_probs`, `typical`, `filtered_typical`, rows of which
    some are greedy.

    Drafts are what the slots draw, but for some of them.
    """
    table, many, k = rows + 3, rows * slots, slots - 1
    logits = (draw.noise(many, vocab + 3) * 3)[:, :vocab]
    logits[:, :: max(vocab // 7, 2)] = -torch.inf
    for bad in range(slots - 1, many, 3 * slots):  # a last slot now and then
        logits[bad] = torch.nan
    kept = logits.clone()
    own = torch.randperm(table, generator=draw.generator)[:rows].to(draw.device, torch.int32)
    columns: dict[str, torch.Tensor | None] = {
        "temperature": draw.uniform(table) * 1.5 * (draw.uniform(table) > 0.2),
        **dict.fromkeys(("top_k", "top_p", "min_p")),
        "seed": draw.integers(-(2**62), 2**62, table),
        "choice": draw.integers(0, 9, table, dtype=torch.int32),
    }
    if kind.startswith("filtered"):
        columns["top_k"] = draw.integers(0, vocab, table, dtype=torch.int32)
        columns["top_p"], columns["min_p"] = draw.uniform(table) * 0.98 + 0.02, draw.uniform(table) * 0.2
    elif kind == "greedy":
        columns["temperature"] = None
    known = draw.integers(1, LONGEST - slots, table, dtype=torch.int32)
    ahead = torch.arange(slots, dtype=torch.int32, device=draw.device).repeat(rows)
    lines, query_len = own.repeat_interleave(slots), draw.integers(1, 3, many, dtype=torch.int32)
    samples = (ahead.view(rows, slots) < draw.integers(0, slots + 1, rows).unsqueeze(1)).flatten()
    token_ids = draw.integers(0, vocab, table, LONGEST, dtype=torch.int32)
    head = (logits, lines, samples, known[lines.long()] + ahead - query_len, query_len, token_ids, slots)
    drawn = ops.verify_drafts(*head, **columns)[0][:, :k].int()
    places = own.long().unsqueeze(1), known[own.long()].long().unsqueeze(1) + torch.arange(k, device=draw.device)
    token_ids[places] = torch.where(draw.uniform(rows, k) < 0.7, drawn, token_ids[places])
    probs = draw.uniform(rows, k, vocab) * (draw.uniform(rows, k, vocab) < 0.5) + 1e-6
    more = {"draft_probs": probs / probs.sum(-1, keepdim=True)} if "probs" in kind else {}
    more |= {"typical": (0.3, 0.09)} if "typical" in kind else {}
    tokens, counts, ok = ops.verify_drafts(*head, **columns, **more)
    counting = torch.arange(slots, device=draw.device) < counts.unsqueeze(1)
    return torch.where(counting, tokens, -1), counts, ok, (logits == kept) | logits.isnan()


KINDS = ("greedy", "plain", "filtered", "probs", "filtered_probs", "typical", "filtered_typical")
VERIFICATION_CASES: dict[str, tuple[Any, Any]] = {
    "verify_drafts": (
        verify_drafts,
        (
            *((5, 3, 70, kind) for kind in KINDS),
            *((2, 6, 331, kind) for kind in ("plain", "filtered_probs")),
            *((1, 1, 5, "plain"), (1, 2, 4100, "probs"), (1, 2, 4100, "typical")),
        ),
    ),
}
