"""What encoders of images have in common: layers, and segments of a packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.functional import gelu

from modelrunner.model_state import BuildContext


class LayerNorm(nn.LayerNorm):
    """A layer norm of the model's type, with empty parameters."""

    def __init__(self, ctx: BuildContext, size: int, eps: float) -> None:
        super().__init__(size, eps, device=ctx.device, dtype=ctx.dtype)


class MLP(nn.Module):
    """down(gelu(up(x))) with biases, gelu by its tanh formula: [P, size] -> [P, size]. Linears: `up` and `down`."""

    def __init__(self, ctx: BuildContext, size: int, inner: int) -> None:
        super().__init__()
        self.up = ctx.linear(size, inner, bias=True)
        self.down = ctx.linear(inner, size, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(gelu(self.up(x), approximate="tanh")))


def starts_of(lengths: Sequence[torch.Tensor]) -> torch.Tensor:
    """First places of segments whose lengths are on the device, and the end of the last: [n + 1] int32. No synchronisation."""
    ends = torch.cat(tuple(lengths)).cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))


def normalised(pixels: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """(pixels * scale - mean) / deviation in float32, as image processors have it.

    pixels: [P, channels, ...] uint8. norm: [3, channels] float32: scale, mean, deviation of each channel.
    """
    scale, mean, deviation = norm.view(3, 1, -1, *[1] * (pixels.dim() - 2))
    wide: torch.Tensor = (pixels.float() * scale - mean) / deviation
    return wide
