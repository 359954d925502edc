"""Linear layers: what they store and how they apply it is a scheme's business, and schemes are plugins.

Model code makes layers with `ctx.linear(...)`, calls them, and never touches their weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from modelrunner.ops import Ops


class LinearScheme(ABC):
    """Stores and applies the weight of one `Linear`. Parameters and buffers are created on the layer, so that they are found by name."""

    name: str = ""

    def __init__(self, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of activations."""
        self.ops = ops
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def create(self, layer: Linear) -> None:
        """Allocate the layer's storage for a weight of [layer.out_features, layer.in_features]."""

    @abstractmethod
    def load(self, layer: Linear, rows: slice, weight: torch.Tensor) -> None:
        """Store `weight` [rows, in_features] (any float dtype, any device) as those output rows, in place."""

    @abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], bias excluded, in x's dtype."""


class Linear(nn.Module):
    """A linear layer whose output may consist of several parts, e.g. fused q, k and v.

    in_features; out_parts: output rows of each part; bias: whether there is one.
    """

    def __init__(self, in_features: int, out_parts: Sequence[int], *, bias: bool, scheme: LinearScheme) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        self.scheme = scheme
        self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=scheme.dtype, device=scheme.device), requires_grad=False) if bias else None
        scheme.create(self)

    def part_rows(self, part: int) -> slice:
        """Output rows of part `part`."""
        start = sum(self.out_parts[:part])
        return slice(start, start + self.out_parts[part])

    def load(self, part: int, tensor: torch.Tensor, kind: str = "weight") -> None:
        """Store one part's `weight` or `bias`, in place. Raises ValueError for a wrong shape."""
        rows = self.part_rows(part)
        want = (self.out_parts[part], self.in_features) if kind == "weight" else (self.out_parts[part],)
        if tuple(tensor.shape) != want:
            raise ValueError(f"{kind} of part {part} has shape {tuple(tensor.shape)}; {want} is needed")
        if kind == "weight":
            self.scheme.load(self, rows, tensor)
        elif self.bias is None:
            raise ValueError(f"part {part} has a bias in the checkpoint, but the layer has none")
        else:
            self.bias.data[rows].copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.scheme.apply(self, x)
        return out if self.bias is None else out + self.bias


class LinearFactory:
    """`ctx.linear(in_features, out_features_or_parts, bias=False)` -> Linear of the chosen scheme."""

    def __init__(self, scheme: LinearScheme) -> None:
        self.scheme = scheme

    def __call__(self, in_features: int, out: int | Sequence[int], *, bias: bool = False) -> Linear:
        return Linear(in_features, (out,) if isinstance(out, int) else out, bias=bias, scheme=self.scheme)
