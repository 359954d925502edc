"""The module for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2) in the layout of MiMo (arXiv:2505.07608).

Dimension letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.draft_layers import DraftLayer, RotaryTable
from modelrunner.model_states.common.layers import RMSNorm
from modelrunner.model_states.mtp.config import MTPConfig


class MTPModel(nn.Module):
    """One decoder layer over the projected norms of a hidden state and of the next token's embedding; its output goes to the target's
    head."""

    def __init__(self, ctx: BuildContext, config: MTPConfig, length: int) -> None:
        """length: positions of the rotary table."""
        super().__init__()
        layer = config.layer
        norm = partial(RMSNorm, ctx, layer.hidden_size, layer.eps)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.projection = ctx.linear(2 * layer.hidden_size, layer.hidden_size)
        self.layer = DraftLayer(ctx, layer, 0)
        self.norm = norm()
        self.rotary = RotaryTable(ctx, layer, length)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention]
    ) -> torch.Tensor:
        """embeddings: [T, H], of the token that follows each position. features: [T, H], the target's normed hidden state or what this
        returned. positions: [T] int64. Returns [T, H], normed."""
        hidden = self.projection(torch.cat((self.hidden_norm(features), self.token_norm(embeddings)), -1))
        out: torch.Tensor = self.norm(self.layer(hidden, self.rotary(positions), attention))
        return out
