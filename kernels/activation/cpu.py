"""Gated activations as one call, for CPUs."""

import torch
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from modelrunner.kernels.chain import chained


@chained
def gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """`reference.gelu_tanh_mul` or `reference.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    if gelu:
        return gelu_of(gate, approximate="tanh").mul_(up)
    return silu(gate).mul_(up)
