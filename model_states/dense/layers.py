"""The decoder's layers. Dimension letters: T tokens, H hidden size, HQ query heads, HK key and value heads, D head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext, Tap
from modelrunner.model_states.common.layers import Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.dense.config import DenseConfig


class Attention(nn.Module):
    """Self-attention. Linears: `qkv` (parts q, k, v) and `output`; with q/k norms, `q_norm` and `k_norm` over each head."""

    def __init__(self, ctx: BuildContext, config: DenseConfig, layer: int) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.layer = layer
        self.group = config.group_of(layer)
        self.head_dim = config.head_dim
        self.sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        self.qkv = ctx.linear(config.hidden_size, self.sizes, bias=config.qkv_bias)
        self.output = ctx.linear(self.sizes[0], config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(ctx, config.head_dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(ctx, config.head_dim, config.eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention]) -> torch.Tensor:
        """x: [T, H]. cos_sin: [T, D], gathered for the step's positions. Returns [T, H]."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).split(self.sizes, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.ops.apply_rope(q, k, None, cos_sin)
        return cast(torch.Tensor, self.output(attention[self.group](q, k, v, self.layer)))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around a residual stream that is carried as a sum not yet taken: the next norm adds."""

    def __init__(self, ctx: BuildContext, config: DenseConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(ctx, config.hidden_size, config.eps)
        self.attention = Attention(ctx, config, layer)
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
        self.register_buffer("cos_sin", cos_sin_table(*inverse_frequencies(config.rope), max_length, ctx.device))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention], tap: Tap) -> torch.Tensor:
        """hidden: [T, H] embeddings. Returns [T, H], normalised."""
        cos_sin = self.cos_sin.index_select(0, positions)
        total = tap("layer.0", hidden)
        normed: torch.Tensor = self.stack[0].attention_norm(total)
        for index, layer in enumerate(self.stack):
            normed, total = layer.mlp_norm.add(layer.attention(normed, cos_sin, attention), total)
            following = self.stack[index + 1].attention_norm if index + 1 < len(self.stack) else self.norm
            normed, total = following.add(layer.mlp(normed), total)
            tapped = tap(f"layer.{index + 1}", total)
            if tapped is not total:  # somebody changed the stream: the norm was taken of what it was before
                total = tapped
                normed = following(total)
        return normed
