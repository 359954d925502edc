"""The norm as one call, for CPUs."""

import math

import torch

from modelrunner.kernels.chain import chained


@chained
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`reference.rms_norm`. A mean would be a sum and a division that makes tensors of its own: as long as all the rest."""
    wide, size = x.float(), float(x.size(-1))
    wide = wide * (wide * wide).sum(-1, keepdim=True).add_(eps * size).rsqrt_().mul_(math.sqrt(size))
    if weight.dtype == torch.float32:
        return wide.mul_(weight).to(x.dtype)
    return wide.to(x.dtype).mul_(weight)


@chained
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fusion `add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


OVERRIDES = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
