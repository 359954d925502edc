"""Gated activations in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer 2020, arXiv:2002.05202): silu(gate) * up. gate_up: [..., 2I], gate first. Returns [..., I] in the same
    dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GEGLU's gate (Shazeer 2020, arXiv:2002.05202): gelu(gate) * up, GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    gate_up: [..., 2I], gate first. Returns [..., I] in the same dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh").mul_(up)
