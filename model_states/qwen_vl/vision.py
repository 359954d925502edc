"""The vision tower: patches of images and videos in, one row for each of the text's placeholder tokens out.

Dimension letters: P patches, E the tower's hidden size, D head size, M patches of a token (merge**2), H the text's hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.functional import embedding, gelu

from modelrunner.model_state import BuildContext
from modelrunner.model_states.common.encoders import MLP, LayerNorm
from modelrunner.model_states.common.layers import GatedMLP, RMSNorm
from modelrunner.model_states.qwen_vl.config import VisionConfig

EPS = 1e-6  # of every norm of the tower


@dataclass(frozen=True)
class Layout:
    """Where the patches of a batch of images and videos lie. Tensors are on the device, tuples on the host.

    coordinates: [P, 2] int32 row and column in the frame. frames, windows: patches of each frame and of each window; the *_starts are
    their first patches and P, [n + 1] int32. order: [P / M] int64 token of each place, or None where tokens lie in their own order.
    taps, weights: [P, 4] entries of the table of learned positions, int32, and their shares, float32; or None.
    """

    coordinates: torch.Tensor
    frames: tuple[int, ...]
    frame_starts: torch.Tensor
    windows: tuple[int, ...]
    window_starts: torch.Tensor
    order: torch.Tensor | None = None
    taps: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class VisionAttention(nn.Module):
    """Self-attention within segments, with rotary positions in both directions of the frame."""

    def __init__(self, ctx: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.heads, self.scale = config.num_heads, config.head_dim**-0.5
        self.qkv = ctx.linear(config.hidden_size, (config.hidden_size,) * 3, bias=True)
        self.output = ctx.linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """x: [P, E]. cos_sin: [P, D] float32. starts, lengths: the segments, as in the operation `segment_attention`. Returns [P, E]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = self.ops.apply_rope(q, k, None, cos_sin)
        attended = self.ops.segment_attention(q, k, v, starts, lengths, scale=self.scale)
        return cast(torch.Tensor, self.output(attended.flatten(1)))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, ctx: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.inner_size
        self.attention_norm = RMSNorm(ctx, size, EPS) if config.gated else LayerNorm(ctx, size, EPS)
        self.attention = VisionAttention(ctx, config)
        self.mlp_norm = RMSNorm(ctx, size, EPS) if config.gated else LayerNorm(ctx, size, EPS)
        self.mlp = GatedMLP(ctx, size, inner, bias=True) if config.gated else MLP(ctx, size, inner)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, starts: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x), cos_sin, starts, lengths)
        if isinstance(self.mlp_norm, RMSNorm):
            normed, x = self.mlp_norm.add(attended, x)
        else:
            x = x + attended
            normed = self.mlp_norm(x)
        return cast(torch.Tensor, x + self.mlp(normed))


class Merger(nn.Module):
    """Makes a row of the text's width of the M patches of a token: [P, E] -> [P / M, H].

    norm_late: the norm is taken over the token instead of over each patch.
    """

    def __init__(self, ctx: BuildContext, config: VisionConfig, width: int, *, norm_late: bool = False) -> None:
        super().__init__()
        self.size = config.hidden_size * config.merge**2
        self.norm_late = norm_late
        if config.gated:
            self.norm: nn.Module = RMSNorm(ctx, config.hidden_size, EPS)
        else:
            self.norm = LayerNorm(ctx, self.size if norm_late else config.hidden_size, EPS)
        self.up = ctx.linear(self.size, self.size, bias=True)
        self.down = ctx.linear(self.size, width, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token = self.norm(x.view(-1, self.size)) if self.norm_late else self.norm(x).view(-1, self.size)
        return cast(torch.Tensor, self.down(gelu(self.up(token))))


class VisionTower(nn.Module):
    """Patch embedding, blocks, merger; where there is DeepStack, a merger more for each copy that leaves on the way."""

    frequencies: torch.Tensor

    def __init__(self, ctx: BuildContext, config: VisionConfig, width: int) -> None:
        """width: the text's hidden size."""
        super().__init__()
        self.config, self.give_way = config, ctx.give_way
        patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.embed = ctx.linear(patch, config.hidden_size, bias=not config.gated)
        if config.position_side:
            shape = (config.position_side**2, config.hidden_size)
            self.positions = nn.Parameter(torch.empty(shape, device=ctx.device, dtype=ctx.dtype), requires_grad=False)
        self.blocks = nn.ModuleList(VisionBlock(ctx, config) for _ in range(config.depth))
        self.merger = Merger(ctx, config, width)
        self.stack_mergers = nn.ModuleList(Merger(ctx, config, width, norm_late=True) for _ in config.deepstack)
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self.register_buffer("frequencies", (1.0 / config.theta**exponents).to(ctx.device), persistent=False)

    def forward(self, patches: torch.Tensor, layout: Layout) -> torch.Tensor:
        """patches: [P, channels * frames * pixels] of the model's type, in the layout's order. Returns [P / M, H * (1 + copies)]: the
        embedding, then what DeepStack adds after the first text layer, the second and so on; tokens in their own order."""
        hidden = self.embed(patches)
        if layout.taps is not None and layout.weights is not None:
            learned = (embedding(layout.taps, self.positions) * layout.weights.unsqueeze(-1)).sum(1)
            hidden = hidden + learned.to(hidden.dtype)
        cos_sin = self.rotary(layout.coordinates)
        copies = {}
        for index, block in enumerate(self.blocks):
            self.give_way()
            whole = not layout.windows or index in self.config.full_layers
            segments = (layout.frame_starts, layout.frames) if whole else (layout.window_starts, layout.windows)
            hidden = block(hidden, cos_sin, *segments)
            if index in self.config.deepstack:
                place = self.config.deepstack.index(index)
                copies[place] = self.stack_mergers[place](hidden)
        merged = torch.cat((self.merger(hidden), *(copies[place] for place in sorted(copies))), -1)
        if layout.order is None:
            return merged
        return torch.empty_like(merged).index_copy_(0, layout.order, merged)

    def rotary(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Cosines and sines, [P, D] float32: of the pairs, the first half follows the row, the second the column (arXiv:2409.12191)."""
        angles = (coordinates.unsqueeze(-1).float() * self.frequencies).flatten(1)
        return torch.cat((angles.cos(), angles.sin()), -1)
