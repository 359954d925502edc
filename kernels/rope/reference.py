"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34) in plain torch, in the half-split layout of GPT-NeoX."""

from __future__ import annotations

import torch


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `rotary_dim` components of every head: component i pairs with i + rotary_dim / 2.

    q: [T, H, D]. k: [T, HK, D]. positions: [T] int64. cos_sin: [max_positions, rotary_dim] float32, cosines in the first half and sines in
    the second, scaling included. With positions None, cos_sin is [T, rotary_dim], already gathered: once a step is enough for all layers.
    Returns new tensors in q's and k's shape and dtype; the products are taken in float32.
    """
    table = cos_sin if positions is None else cos_sin.index_select(0, positions)
    cos, sin = table.unsqueeze(1).chunk(2, -1)
    rotary_dim, heads = table.shape[-1], (q.shape[1], k.shape[1])
    x = torch.cat((q, k), 1)
    rest = x[..., rotary_dim:]
    wide = x[..., :rotary_dim].float()
    first, second = wide.chunk(2, -1)
    rotated = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    parts = tuple(part.to(x.dtype) for part in rotated) if x.dtype != torch.float32 else rotated
    out = torch.cat((*parts, rest) if rest.shape[-1] else parts, -1)
    q_out, k_out = out.split(heads, 1)
    return q_out, k_out
