"""The layers of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840, section 3). Letters: T tokens, H hidden size, V draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.draft_layers import RotaryTable, draft_groups
from modelrunner.model_states.common.groups import group_of_layer
from modelrunner.model_states.common.layers import Attention, Embedding, GatedMLP, RMSNorm
from modelrunner.model_states.eagle3.config import NUM_FUSED, Eagle3Config


class FusedLayer(nn.Module):
    """A decoder layer whose attention reads embedding and feature side by side, each under a norm of its own."""

    def __init__(self, ctx: BuildContext, config: Eagle3Config) -> None:
        super().__init__()
        layer = config.layer
        norm = partial(RMSNorm, ctx, eps=layer.eps)
        self.norm_before_residual = config.norm_before_residual
        self.input_norm, self.hidden_norm = norm(layer.hidden_size), norm(layer.hidden_size)
        self.attention = Attention(
            ctx,
            layer.hidden_size,
            group_of_layer(draft_groups(layer), 0),
            0,
            qkv_bias=layer.qkv_bias,
            output_bias=layer.output_bias,
            input_size=2 * layer.hidden_size,
        )
        self.mlp_norm = norm(layer.hidden_size)
        self.mlp = GatedMLP(ctx, layer.hidden_size, layer.intermediate_size, bias=layer.mlp_bias)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, cos_sin: torch.Tensor, attention: Mapping[str, BoundAttention]
    ) -> torch.Tensor:
        """embeddings, features: [T, H]. cos_sin: [T, rotary dimension]. Returns [T, H]."""
        normed = self.hidden_norm(features)
        qkv = self.attention.qkv(torch.cat((self.input_norm(embeddings), normed), -1))
        stream = normed if self.norm_before_residual else features
        total = self.attention.output.added(self.attention.heads(qkv, cos_sin, attention), stream)
        return self.mlp.residual(total, self.mlp_norm)


class Eagle3Model(nn.Module):
    """Predicts tokens from hidden states of three of the target's layers, later from its own.

    `d2t` [V] int64: what to add to an id of the draft vocabulary to have the target's; absent where both are the same.
    """

    d2t: torch.Tensor

    def __init__(self, ctx: BuildContext, config: Eagle3Config, length: int) -> None:
        """length: positions of the rotary table."""
        super().__init__()
        layer = config.layer
        self.embed = Embedding(ctx, layer.vocab_size, layer.hidden_size) if config.own_embedding else None
        self.fc = ctx.linear(NUM_FUSED * config.target_hidden_size, layer.hidden_size, bias=config.fc_bias)
        self.layer = FusedLayer(ctx, config)
        self.norm = RMSNorm(ctx, layer.hidden_size, layer.eps)
        self.head = ctx.linear(layer.hidden_size, config.draft_vocab_size) if config.own_head else None
        self.rotary = RotaryTable(ctx, layer, length)
        self.mapped = config.mapped
        if config.mapped:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=ctx.device))

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, 3 * target's hidden size], of the three layers side by side. Returns features [T, H]."""
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention]
    ) -> torch.Tensor:
        """embeddings: [T, H], of the token that follows each position. features: [T, H], fused ones or what this returned.
        positions: [T] int64. Returns the next features, [T, H]."""
        out: torch.Tensor = self.layer(embeddings, features, self.rotary(positions), attention)
        return out

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids [n] int64."""
        return ids + self.d2t.index_select(0, ids) if self.mapped else ids
