"""What drafters with weights have in common: a decoder block, how embedding and head are shared with the target, and tables of positions.

Dimension letters: T tokens, H hidden size of the drafter, D rotary dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.groups import group_of_layer
from modelrunner.model_states.common.layers import Attention, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.dense.config import DenseConfig, dense_config
from modelrunner.model_states.dense.layers import cache_groups

PREFIX = "draft."  # of a drafter's cache groups, which lie beside the target's


def draft_groups(config: DenseConfig) -> tuple[Any, ...]:
    """The cache groups of a drafter's layers: `draft.full`, `draft.sliding`, whichever there are."""
    return tuple(replace(group, name=PREFIX + group.name) for group in cache_groups(config))


def block_config(card: ModelCard, architecture: str, **changes: Any) -> DenseConfig:
    """The dense configuration of a head's decoder layers. architecture: whose layers they are, whatever the card calls itself.

    changes: fields of the configuration to read differently. Raises ValueError as `dense_config` does.
    """
    config = {**card.config, **changes, "architectures": [architecture]}
    return dense_config(replace(card, config=config, architectures=(architecture,)))


def with_biases(config: DenseConfig, names: Collection[str]) -> DenseConfig:
    """`config` with the biases that the checkpoint has: heads are trained for many families, and their configurations seldom say."""
    has = {part: any(name.endswith(f"self_attn.{part}_proj.bias") for name in names) for part in ("q", "o")}
    return replace(config, qkv_bias=has["q"], output_bias=has["o"])


class RotaryTable(nn.Module):
    """Rotary positions up to the drafter's own length: `cos_sin` [length, D] float32."""

    cos_sin: torch.Tensor

    def __init__(self, ctx: BuildContext, config: DenseConfig, length: int) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.register_buffer("cos_sin", cos_sin_table(*inverse_frequencies(config.rope, length), length, ctx.device))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [T] int64, below the length. Returns [T, D]."""
        out = self.cos_sin.new_empty((positions.shape[0], self.cos_sin.shape[1]))
        self.ops.embedding(positions, self.cos_sin, out)
        return out


class DraftLayer(nn.Module):
    """A decoder layer of a draft head: attention and MLP around the residual stream.

    pre_norm: whether attention reads the norm of the stream (`attention_norm`), as in the target, or the stream itself.
    """

    def __init__(self, ctx: BuildContext, config: DenseConfig, layer: int, *, pre_norm: bool = True) -> None:
        super().__init__()
        groups = draft_groups(config)
        self.attention_norm = RMSNorm(ctx, config.hidden_size, config.eps) if pre_norm else None
        self.attention = Attention(
            ctx,
            config.hidden_size,
            group_of_layer(groups, layer),
            layer,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            norm=partial(RMSNorm, ctx, eps=config.eps) if config.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(ctx, config.hidden_size, config.eps)
        self.mlp = GatedMLP(ctx, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention]) -> torch.Tensor:
        """x: [T, H]. cos_sin: [T, D]. Returns [T, H]."""
        if self.attention_norm is None:
            total = self.attention.output.added(self.attention.heads(self.attention.qkv(x), cos_sin, attention), x)
        else:
            total = self.attention.residual(x, self.attention_norm, cos_sin, attention)
        return self.mlp.residual(total, self.mlp_norm)
