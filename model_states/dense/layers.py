"""The decoder's layers. Dimension letters: T tokens, H hidden size, D rotary dimension."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext, FullAttention, Tap
from modelrunner.model_states.common.groups import group_of_layer, window_groups
from modelrunner.model_states.common.layers import Attention, Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.dense.config import DenseConfig


def cache_groups(config: DenseConfig) -> tuple[FullAttention, ...]:
    """The groups `full` and `sliding`, whichever there are."""
    return window_groups(config.windows, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, ctx: BuildContext, config: DenseConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(ctx, config.hidden_size, config.eps)
        self.attention = Attention(
            ctx,
            config.hidden_size,
            group_of_layer(cache_groups(config), layer),
            layer,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            norm=partial(RMSNorm, ctx, eps=config.eps) if config.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(ctx, config.hidden_size, config.eps)
        self.mlp = GatedMLP(ctx, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)


class DenseModel(nn.Module):
    """Embedding, decoder layers, final norm, head. `cos_sin` [max length, D] float32 is the rotary table."""

    cos_sin: torch.Tensor

    def __init__(self, ctx: BuildContext, config: DenseConfig, max_length: int) -> None:
        super().__init__()
        self.embed = Embedding(ctx, config.vocab_size, config.hidden_size)
        self.stack = tuple(DecoderLayer(ctx, config, layer) for layer in range(config.num_layers))  # the same modules, typed
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(ctx, config.hidden_size, config.eps)
        self.head = ctx.linear(config.hidden_size, config.vocab_size, tied=self.embed.weight if config.tied else None)
        self.register_buffer("cos_sin", cos_sin_table(*inverse_frequencies(config.rope, max_length), max_length, ctx.device))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        tap: Tap,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden: [T, H] embeddings. Returns [T, H], normalised; with sampled [n, H], see `ModelState.forward`, and overwrites hidden."""
        cos_sin = self.rotary(positions)
        if sampled is not None:
            return self.narrowed(hidden, cos_sin, attention, sampled)
        total = tap("layer.0", hidden)
        for index, layer in enumerate(self.stack):
            total = layer.attention.residual(total, layer.attention_norm, cos_sin, attention)
            total = tap(f"layer.{index + 1}", layer.mlp.residual(total, layer.mlp_norm))
        normed: torch.Tensor = self.norm(total)
        return normed

    def narrowed(
        self, total: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention], sampled: torch.Tensor
    ) -> torch.Tensor:
        """`forward` of a step in which nobody looks at a layer: sums take the place of what they are added to, and the last layer attends,
        and goes on, with the sampled tokens alone."""
        for layer in self.stack[:-1]:
            total = layer.attention.residual(total, layer.attention_norm, cos_sin, attention, in_place=True)
            total = layer.mlp.residual(total, layer.mlp_norm, in_place=True)
        last = self.stack[-1]
        total = last.attention.residual(total, last.attention_norm, cos_sin, attention, in_place=True, tokens=sampled)
        normed: torch.Tensor = self.norm(last.mlp.residual(total, last.mlp_norm, in_place=True))
        return normed

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Lines of the rotary table for positions [T]: [T, D] float32."""
        cos_sin = self.cos_sin.new_empty((positions.shape[0], self.cos_sin.shape[1]))
        self.embed.ops.embedding(positions, self.cos_sin, cos_sin)
        return cos_sin
