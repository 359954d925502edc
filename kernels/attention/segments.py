"""Attention within segments of a packed sequence, without a cache: what encoders of images and videos need."""

from __future__ import annotations

from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...], *, scale: float
) -> torch.Tensor:
    """Every token sees all tokens of its own segment, and no other.

    q, k, v: [T, H, D]. lengths: tokens of each segment, on the host; their sum is T. starts: [len(lengths) + 1] int32, the same on the
    device: first token of each segment, and T. scale: factor on q.k. Returns [T, H, D] in q's dtype.
    """
    out, begin = torch.empty_like(q), 0
    for length, alike in groupby(lengths):
        count = sum(1 for _ in alike)
        end = begin + count * length
        queries, keys, values = (x[begin:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        out[begin:end] = scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(0, 1)
        begin = end
    return out


def packed_segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...], *, scale: float
) -> torch.Tensor:
    """`segment_attention` in one launch, by torch's FlashAttention (Dao 2023, arXiv:2307.08691), which takes 16-bit types."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8 or q.shape[-1] > 256 or not lengths:
        return segment_attention(q, k, v, starts, lengths, scale=scale)
    longest = max(lengths)
    # What `torch.nn.attention.varlen.varlen_attn` calls, without its custom operation around it, which takes the host as long again.
    forward = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(q, k, v, starts, starts, longest, longest, 0.0, False, False, scale=scale)[0]
    return out
