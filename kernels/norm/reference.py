"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4) in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., D]. weight: [D], in x's dtype or float32. Returns x's shape and dtype. 16-bit inputs: the mean and the quotient are taken in
    float32. With a weight of 16 bits the quotient is rounded to x's dtype and then multiplied, as the Llama family was trained; with a
    weight of float32 the product is rounded, as Gemma and OLMo 2 were.
    """
    wide = x.float()  # x itself if it is float32
    wide = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        return wide.mul_(weight).to(x.dtype)
    return wide.to(x.dtype).mul_(weight)
