"""The whole module: the dense decoder with positions in three dimensions, and the vision tower beside it.

Dimension letters: T tokens, H hidden size, D rotary dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.media import MediaBatch
from modelrunner.model_state import BuildContext, Tap
from modelrunner.model_states.dense.layers import DenseModel
from modelrunner.model_states.qwen_vl.config import QwenVLConfig
from modelrunner.model_states.qwen_vl.vision import VisionTower


class QwenVLText(DenseModel):
    """The decoder. `axes` [D] int64: which of the three positions each column of the rotary table follows (M-RoPE, arXiv:2409.12191)."""

    axes: torch.Tensor

    def __init__(self, ctx: BuildContext, config: QwenVLConfig, max_length: int) -> None:
        super().__init__(ctx, config.text, max_length)
        self.width = config.text.hidden_size
        self.copies = len(config.vision.deepstack)
        self.register_buffer("axes", torch.tensor(config.axes * 2, dtype=torch.int64, device=ctx.device), persistent=False)

    def stacked(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        tap: Tap,
        media: MediaBatch,
    ) -> torch.Tensor:
        """`forward` with DeepStack (Meng et al. 2024, arXiv:2406.04334): behind layer i, the i-th copy that the vision tower gave joins the
        residual stream of the tokens of media."""
        cos_sin = self.rotary(positions)
        total = tap("layer.0", hidden)
        for index, layer in enumerate(self.stack):
            total = layer.attention.residual(total, layer.attention_norm, cos_sin, attention)
            total = layer.mlp.residual(total, layer.mlp_norm)
            if index < self.copies:
                self.embed.ops.add_media(total, media.arena, media.slots, (1 + index) * self.width)
            total = tap(f"layer.{index + 1}", total)
        normed: torch.Tensor = self.norm(total)
        return normed

    def rotary(self, positions: torch.Tensor) -> torch.Tensor:
        """Lines of the rotary table: [T, D] float32. positions: [T] of text, or [3, T] of time, height and width."""
        if positions.dim() == 1:
            return super().rotary(positions)
        return self.cos_sin.gather(0, positions.index_select(0, self.axes).t())


class QwenVLModel(nn.Module):
    """`text`, the decoder, and `vision`, the tower."""

    def __init__(self, ctx: BuildContext, config: QwenVLConfig, max_length: int) -> None:
        super().__init__()
        self.text = QwenVLText(ctx, config, max_length)
        self.vision = VisionTower(ctx, config.vision, config.text.hidden_size)
