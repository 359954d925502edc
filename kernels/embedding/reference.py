"""Embedding lookup in plain torch."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = weight[ids[t]], in place. ids: [T] int64. weight: [V, H]. out: [T, H], of weight's dtype or another."""
    if out.dtype == weight.dtype:
        torch.index_select(weight, 0, ids, out=out)
    else:
        out.copy_(weight.index_select(0, ids))
