"""The layers of an EAGLE head (Li et al. 2024, arXiv:2401.15077, section 4.1). Dimension letters: T tokens, H hidden size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.draft_layers import DraftLayer, RotaryTable
from modelrunner.model_states.common.layers import Embedding
from modelrunner.model_states.eagle.config import EagleConfig


class EagleModel(nn.Module):
    """Predicts the target's next feature from its feature and the token that followed: decoder layers over fc([embedding; feature]).

    The first layer reads its input without a norm. Features are what the target's head reads, so its head serves this model too.
    """

    def __init__(self, ctx: BuildContext, config: EagleConfig, length: int) -> None:
        """length: positions of the rotary table."""
        super().__init__()
        layer = config.layer
        self.embed = Embedding(ctx, layer.vocab_size, layer.hidden_size) if config.own_embedding else None
        self.fc = ctx.linear(2 * layer.hidden_size, layer.hidden_size, bias=config.fc_bias)
        self.stack = tuple(
            DraftLayer(ctx, layer, index, pre_norm=index > 0) for index in range(layer.num_layers)
        )  # the same modules, typed
        self.layers = nn.ModuleList(self.stack)
        self.head = ctx.linear(layer.hidden_size, layer.vocab_size) if config.own_head else None
        self.rotary = RotaryTable(ctx, layer, length)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attention: Mapping[str, BoundAttention]
    ) -> torch.Tensor:
        """embeddings: [T, H], of the token that follows each position. features: [T, H], of the target or of this model at the position.
        positions: [T] int64. Returns the next features, [T, H]."""
        cos_sin = self.rotary(positions)
        hidden: torch.Tensor = self.fc(torch.cat((embeddings, features), -1))
        for layer in self.stack:
            hidden = layer(hidden, cos_sin, attention)
        return hidden
