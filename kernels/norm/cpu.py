"""The norm as one call, for CPUs."""

import torch

from modelrunner.kernels.chain import chained


@chained
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`reference.rms_norm`, in the same operations."""
    wide = x.float()
    wide = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        return wide.mul_(weight).to(x.dtype)
    return wide.to(x.dtype).mul_(weight)


@chained
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fusion `add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


OVERRIDES = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
