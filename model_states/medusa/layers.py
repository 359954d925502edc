"""Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1). Letters: N rows, H hidden size, V vocabulary size."""

from __future__ import annotations

import torch
from torch import nn

from modelrunner.model_state import BuildContext
from modelrunner.model_states.medusa.config import MedusaConfig


class MedusaHead(nn.Module):
    """Residual blocks x + SiLU(linear(x)), then a projection to the vocabulary."""

    def __init__(self, ctx: BuildContext, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.stack = tuple(ctx.linear(size, size, bias=True) for _ in range(config.num_layers))  # the same modules, typed
        self.blocks = nn.ModuleList(self.stack)
        self.output = ctx.linear(size, config.vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> logits [N, V]"""
        for block in self.stack:
            hidden = hidden + torch.nn.functional.silu(block(hidden))
        logits: torch.Tensor = self.output(hidden)
        return logits


class MedusaModel(nn.Module):
    """Head i predicts, from the hidden state of which the target's head predicts the next token, the token i + 1 places after that one."""

    def __init__(self, ctx: BuildContext, config: MedusaConfig) -> None:
        super().__init__()
        self.stack = tuple(MedusaHead(ctx, config) for _ in range(config.num_heads))  # the same modules, typed
        self.heads = nn.ModuleList(self.stack)
