"""Layers that decoders share, built from a `BuildContext`: token embedding, RMS norm, attention, gated MLP.

Dimension letters: T tokens, H hidden size, HQ query heads, HK key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from modelrunner.attention import BoundAttention, Rotary
from modelrunner.model_state import BuildContext, FullAttention


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
    """Root-mean-square norm over the last dimension: `weight` [size].

    wide: the weight is float32 whatever the model's type, and the result is rounded once, after it was applied.
    """

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, wide: bool = False) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.eps = eps
        dtype = torch.float32 if wide else ctx.dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=ctx.device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.rms_norm(x, self.weight, self.eps))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and that sum. Shapes and dtype as x."""
        normed, total = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total


class Attention(nn.Module):
    """Self-attention with rotary positions. Linears: `qkv` (parts q, k, v) and `output`; with norms, `q_norm` and `k_norm`.

    group: the cache group that serves `layer`; it has the numbers of heads. norm: makes a norm of the size that it is given.
    norm_all_heads: q and k are normed over all heads at once instead of each head by itself. input_size: of what q, k and v are made from,
    where that is not the hidden size.
    """

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        group: FullAttention,
        layer: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        norm: Callable[[int], RMSNorm] | None = None,
        norm_all_heads: bool = False,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.layer = layer
        self.group = group.name
        self.head_dim = group.head_dim
        self.norm_all_heads = norm_all_heads
        self.sizes = tuple(heads * group.head_dim for heads in (group.num_heads, group.num_kv_heads, group.num_kv_heads))
        self.qkv = ctx.linear(input_size or hidden_size, self.sizes, bias=qkv_bias)
        self.output = ctx.linear(self.sizes[0], hidden_size, bias=output_bias)
        self.q_norm = norm(self.sizes[0] if norm_all_heads else group.head_dim) if norm is not None else None
        self.k_norm = norm(self.sizes[1] if norm_all_heads else group.head_dim) if norm is not None else None

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention]) -> torch.Tensor:
        """x: [T, input size]. cos_sin: [T, rotary dimension], gathered for the step's positions. Returns [T, H]."""
        return cast(torch.Tensor, self.output(self.heads(self.qkv(x), cos_sin, attention)))

    def residual(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        cos_sin: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        in_place: bool = False,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x + attention(norm(x)), where operations may be fused. Shapes as in `forward`; a new tensor, or with in_place perhaps x.

        tokens: [n] int64, the last of each row: those of x whose result is wanted, [n, H].
        """
        heads = self.heads(self.qkv.normed(x, norm), cos_sin, attention, tokens)
        return self.output.added(heads, x if tokens is None else x.index_select(0, tokens), in_place)

    def heads(
        self, qkv: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention], tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the heads see: [T, (HQ + 2 HK) * D] -> [T, HQ * D], or [n, HQ * D] of `tokens` (see `residual`)."""
        norms, bound = (self.q_norm, self.k_norm), attention[self.group]
        if norms[0] is None or norms[1] is None or not self.norm_all_heads:
            given = () if norms[0] is None or norms[1] is None else (norms[0].weight, norms[1].weight, norms[0].eps)
            rotary = Rotary(cos_sin, *given)
            return bound.from_qkv(qkv, rotary, self.layer) if tokens is None else bound.from_qkv_at(qkv, rotary, self.layer, tokens)
        q, k, v = qkv.split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (norms[0](q), norms[1](k), v))
        q, k = self.ops.apply_rope(q, k, None, cos_sin)
        out = bound(q, k, v, self.layer)
        return out if tokens is None else out.index_select(0, tokens)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product. Linears: `gate_up` (parts gate, up) and `down`.

    activation: the operation that makes act(gate) * up of both.
    """

    def __init__(
        self, ctx: BuildContext, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: str = "silu_mul"
    ) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.activation = activation
        self.gate_up = ctx.linear(hidden_size, (intermediate_size, intermediate_size), bias=bias)
        self.down = ctx.linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        activation = getattr(self.ops, self.activation)
        return cast(torch.Tensor, self.down(activation(self.gate_up(x))))

    def residual(self, x: torch.Tensor, norm: RMSNorm, in_place: bool = False) -> torch.Tensor:
        """x + mlp(norm(x)), where operations may be fused: [T, hidden_size] -> [T, hidden_size], new, or with in_place perhaps x."""
        return self.down.added(self.gate_up.gated(x, norm, self.activation), x, in_place)
