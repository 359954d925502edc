"""The vision tower of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM: tiles in, the rows of placeholder tokens out.

Dimension letters: N tiles, P patches of a tile, E the tower's hidden size, H the text's hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.encoders import MLP, LayerNorm
from modelrunner.model_states.idefics3.config import VisionConfig


class VisionAttention(nn.Module):
    """Self-attention within a tile."""

    def __init__(self, ctx: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.heads, self.scale = config.num_heads, (config.hidden_size // config.num_heads) ** -0.5
        self.qkv = ctx.linear(config.hidden_size, (config.hidden_size,) * 3, bias=True)
        self.output = ctx.linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """x: [N * P, E]. starts, lengths: the tiles, as in the operation `segment_attention`. Returns [N * P, E]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return cast(torch.Tensor, self.output(self.ops.segment_attention(q, k, v, starts, lengths, scale=self.scale).flatten(1)))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, ctx: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(ctx, config.hidden_size, config.eps)
        self.attention = VisionAttention(ctx, config)
        self.mlp_norm = LayerNorm(ctx, config.hidden_size, config.eps)
        self.mlp = MLP(ctx, config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), starts, lengths)
        return cast(torch.Tensor, x + self.mlp(self.mlp_norm(x)))


class VisionTower(nn.Module):
    """Patch embedding, learned positions, blocks, norm, pixel shuffle and projection. `places` [P] int64: each patch's entry in the table
    of positions."""

    places: torch.Tensor

    def __init__(self, ctx: BuildContext, config: VisionConfig, width: int) -> None:
        """width: the text's hidden size."""
        super().__init__()
        self.config, self.give_way = config, ctx.give_way
        self.embed = ctx.linear(config.channels * config.patch_size**2, config.hidden_size, bias=True)
        shape = (config.position_side**2, config.hidden_size)
        self.positions = nn.Parameter(torch.empty(shape, device=ctx.device, dtype=ctx.dtype), requires_grad=False)
        self.register_buffer("places", patch_places(config).to(ctx.device), persistent=False)
        self.blocks = nn.ModuleList(VisionBlock(ctx, config) for _ in range(config.num_layers))
        self.norm = LayerNorm(ctx, config.hidden_size, config.eps)
        self.projection = ctx.linear(config.hidden_size * config.shuffle**2, width)

    def forward(self, patches: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """patches: [N * P, channels * pixels] of the model's type, each tile's row by row. starts, lengths: the tiles, see
        `VisionAttention`. Returns [N * tokens of a tile, H]."""
        count = len(lengths)
        hidden = (self.embed(patches).view(count, -1, self.config.hidden_size) + self.positions[self.places]).flatten(0, 1)
        for block in self.blocks:
            self.give_way()
            hidden = block(hidden, starts, lengths)
        side, shuffle = self.config.patches_across // self.config.shuffle, self.config.shuffle
        tokens = self.norm(hidden).view(count, side, shuffle, side, shuffle, -1).transpose(2, 3)  # pixel shuffle: arXiv:1609.05158
        return cast(torch.Tensor, self.projection(tokens.reshape(count * side * side, -1)))


def patch_places(config: VisionConfig) -> torch.Tensor:
    """Entries of the square table of learned positions for the patches of a tile, [P] int64: of tiles of another size than the table's, the
    nearest below, worked out in float32 as the weights were trained with."""
    count, side = config.patches_across, config.position_side
    shares = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    places = torch.bucketize(shares, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return (places[:, None] * side + places).flatten()
