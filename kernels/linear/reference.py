"""Matrix products of linear layers in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T. x: [..., in]. weight: [out, in]. Returns [..., out] in x's dtype."""
    if x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and x.device.type == "cpu":
        # One row: oneDNN's product arranges the weight first, which costs more than the product itself.
        return torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], -1)
    return linear(x, weight)


def int8_matmul(x: torch.Tensor, qweight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x @ (scale * qweight).T with weights kept in 8 bits. x: [..., in]. qweight: [out, in] int8. scale: [out] float32, of each output.

    Returns [..., out] in x's dtype.
    """
    return linear(x, qweight.to(x.dtype)).mul_(scale.to(x.dtype))
