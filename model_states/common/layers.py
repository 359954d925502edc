"""Layers that decoders share, built from a `BuildContext`: token embedding, RMS norm, gated MLP."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from modelrunner.model_state import BuildContext


class Embedding(nn.Module):
    """Token embeddings: `weight` [vocab_size, hidden_size]."""

    def __init__(self, ctx: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=ctx.dtype, device=ctx.device), requires_grad=False)

    def forward(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """ids: [T] int64. Writes [T, hidden_size] into `out`."""
        self.ops.embedding(ids, self.weight, out)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: `weight` [size]."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=ctx.dtype, device=ctx.device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.rms_norm(x, self.weight, self.eps))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum. Shapes and dtype as x."""
        normed, total = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product. Linears: `gate_up` (parts gate, up) and `down`."""

    def __init__(self, ctx: BuildContext, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.gate_up = ctx.linear(hidden_size, (intermediate_size, intermediate_size), bias=bias)
        self.down = ctx.linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return cast(torch.Tensor, self.down(self.ops.silu_mul(self.gate_up(x))))
