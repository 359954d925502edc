"""Linear layers: what they store and how they apply it is a scheme's business, and schemes are plugins.

Model code makes layers with `ctx.linear(...)`, calls them, and never touches their weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import nn

from modelrunner.ops import Ops

QUANTISED_AT_ONCE = 2**20  # weights: few enough for the processor's cache


class LinearScheme(ABC):
    """Stores and applies the weight of one `Linear`. Parameters and buffers are created on the layer, so that they are found by name."""

    name: str = ""
    deterministic: bool = False  # a row's result depends, bit for bit, on no other row, provided that this holds for the operations

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

    def apply_biased(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`apply`, plus `bias` [out_features]."""
        return self.apply(layer, x) + bias

    def apply_normed(self, layer: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`apply` to the norm of x. A scheme may do both in one pass."""
        return self.apply(layer, self.ops.rms_norm(x, norm.weight, norm.eps))

    def apply_added(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` [..., out_features] plus `apply`, in a new tensor."""
        return residual + self.apply(layer, x)

    def apply_added_in_place(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`apply_added`, which may put its result where `residual` is."""
        return self.apply_added(layer, x, residual)

    def apply_gated(self, layer: Linear, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        """The gated activation of `apply_normed`, see `Linear.gated`."""
        return cast(torch.Tensor, getattr(self.ops, activation)(self.apply_normed(layer, x, norm)))


class Norm(Protocol):
    """A root-mean-square norm as its consumer sees it: weight [size] and eps, as in the operation `rms_norm`."""

    weight: nn.Parameter
    eps: float


class Linear(nn.Module):
    """A linear layer whose output may consist of several parts, e.g. fused q, k and v.

    in_features; out_parts: output rows of each part; bias: whether there is one. tied: a parameter of [out_features, in_features] that
    holds the same values (an embedding); a scheme may use it as its storage, and may as well keep a copy in its own form.
    """

    tied: nn.Parameter | None
    weight: nn.Parameter  # of a scheme that stores floats
    qweight: torch.Tensor  # of a scheme that stores integers
    scale: torch.Tensor
    packed_scale: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        bias: bool,
        scheme: LinearScheme,
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_parts = tuple(out_parts)
        self.out_features = sum(out_parts)
        self.scheme = scheme
        if tied is not None and tuple(tied.shape) != (self.out_features, in_features):
            raise ValueError(f"a Linear of [{self.out_features}, {in_features}] cannot be tied to a parameter of {list(tied.shape)}")
        self.__dict__["tied"] = tied  # not registered: its owner lists it
        self.bias = (
            nn.Parameter(torch.zeros(self.out_features, dtype=scheme.dtype, device=scheme.device), requires_grad=False) if bias else None
        )
        scheme.create(self)

    def part_rows(self, part: int) -> slice:
        """Output rows of part `part`."""
        start = sum(self.out_parts[:part])
        return slice(start, start + self.out_parts[part])

    def load(self, part: int, tensor: torch.Tensor, kind: str = "weight") -> None:
        """Store one part's `weight` or `bias`, in place. Raises ValueError, before anything is written, for a wrong shape."""
        check_part(self, part, tensor, kind)
        rows = self.part_rows(part)
        if kind == "weight" or self.bias is None:
            self.scheme.load(self, rows, tensor)
        else:
            self.bias.data[rows].copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self, x) if self.bias is None else self.scheme.apply_biased(self, x, self.bias)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The layer's output for the norm of x: [..., in_features] -> [..., out_features]."""
        out = self.scheme.apply_normed(self, x, norm)
        return out if self.bias is None else out + self.bias

    def added(self, x: torch.Tensor, residual: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        """`residual` plus the layer's output: [..., in_features], [..., out_features] -> [..., out_features], a new tensor.

        in_place: nobody needs `residual` any more, and the result may be put there.
        """
        if self.bias is not None:
            residual, in_place = residual + self.bias, True
        return self.scheme.apply_added_in_place(self, x, residual) if in_place else self.scheme.apply_added(self, x, residual)

    def gated(self, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        """activation of the output for the norm of x: [..., in_features] -> [..., out_features / 2].

        activation: the operation that makes act(gate) * up of the layer's two parts, `silu_mul` or `gelu_tanh_mul`.
        """
        if self.bias is None:
            return self.scheme.apply_gated(self, x, norm, activation)
        return cast(torch.Tensor, getattr(self.scheme.ops, activation)(self.normed(x, norm)))


def check_slot(layer: Linear, part: object, kind: str) -> None:
    """Raise ValueError unless the layer has such a part, and stores such a kind of tensor of it."""
    if kind not in ("weight", "bias"):
        raise ValueError(f"kind {kind!r}; a Linear takes 'weight' and 'bias'")
    parts = len(layer.out_parts)
    if not isinstance(part, int) or not 0 <= part < parts:
        raise ValueError(f"part {part!r} of a Linear of {parts} part{'s' * (parts > 1)}; accepted: {', '.join(map(str, range(parts)))}")


def check_part(layer: Linear, part: int, tensor: torch.Tensor, kind: str) -> None:
    """Raise ValueError unless `layer.load(part, tensor, kind)` can store the tensor."""
    check_slot(layer, part, kind)
    want = (layer.out_parts[part], layer.in_features) if kind == "weight" else (layer.out_parts[part],)
    if tuple(tensor.shape) != want:
        raise ValueError(f"{kind} of part {part} has shape {tuple(tensor.shape)}; {want} is needed")
    if kind == "bias" and layer.bias is None:
        raise ValueError(f"part {part} has a bias in the checkpoint, but the layer has none")


class LinearFactory:
    """Makes the layers of one model: `ctx.linear(in_features, out, bias=False, tied=None)` -> Linear of the chosen scheme."""

    def __init__(self, scheme: LinearScheme) -> None:
        self.scheme = scheme

    def __call__(self, in_features: int, out: int | Sequence[int], *, bias: bool = False, tied: nn.Parameter | None = None) -> Linear:
        """A new layer, empty until its weights are loaded.

        out: output features, or those of each part of a fused layer, e.g. (q, k, v): a `Target`'s `part` counts them, the output holds
        them side by side. bias: add one, zero until loaded. tied: parameter [out_features, in_features] with the same values, see `Linear`.
        """
        return Linear(in_features, (out,) if isinstance(out, int) else out, bias=bias, scheme=self.scheme, tied=tied)


class PlainScheme(LinearScheme):
    """Weights in the activations' type: one parameter `weight` [out, in]. A tied layer uses the parameter that it is tied to."""

    name = "plain"
    deterministic = True

    def create(self, layer: Linear) -> None:
        if layer.tied is None:
            shape = (layer.out_features, layer.in_features)
            layer.weight = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
        else:
            layer.weight = layer.tied

    def load(self, layer: Linear, rows: slice, weight: torch.Tensor) -> None:
        layer.weight.data[rows].copy_(weight)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.matmul(x, layer.weight))

    def apply_biased(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return super().apply_biased(layer, x, bias)
        return cast(torch.Tensor, self.ops.matmul_add(x, layer.weight, bias))

    def apply_normed(self, layer: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.norm_matmul(x, norm.weight, norm.eps, layer.weight))

    def apply_added(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.matmul_add(x, layer.weight, residual))

    def apply_added_in_place(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.matmul_add_in_place(x, layer.weight, residual))

    def apply_gated(self, layer: Linear, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        return cast(torch.Tensor, self.ops.norm_gated_matmul(x, norm.weight, norm.eps, layer.weight, activation))


def quantised_rows(weight: torch.Tensor, device: torch.device) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """A weight [rows, in] of any float dtype as 8-bit integers, some rows at a time: (rows, q [n, in] float32, scale [n] float32).

    q = round(w / scale), scale = max|w| of the row / 127.
    """
    step = max(1, QUANTISED_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        wide = weight[start : start + step].to(device=device, dtype=torch.float32)
        scale = wide.abs().amax(-1).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
        yield slice(start, start + wide.shape[0]), (wide / scale[:, None]).round_(), scale


class Int8Scheme(LinearScheme):
    """8-bit weights: q = round(w / scale), scale = max|w| of the output row / 127, so that w ~ scale * q; activations stay floats.

    Buffers `qweight` [out, in] int8 and `scale` [out] float32. A tied layer keeps its own 8-bit copy.

    On the CPU, up to PACKED_ROWS rows run in torch's weight-only kernel, which reads a quarter of float32's bytes and takes bfloat16
    (results carry 8 bits). More rows run as `int8_matmul`, where widening the weights costs less than that kernel's row-by-row work; so
    a row's result in a large batch differs from its result alone by bfloat16's rounding.
    """

    name = "int8"
    deterministic = True
    PACKED_ROWS = 16

    def create(self, layer: Linear) -> None:
        shape = (layer.out_features, layer.in_features)
        layer.register_buffer("qweight", torch.zeros(shape, dtype=torch.int8, device=self.device))
        layer.register_buffer("scale", torch.zeros(layer.out_features, dtype=torch.float32, device=self.device))
        layer.register_buffer("packed_scale", torch.zeros(layer.out_features, dtype=torch.bfloat16, device=self.device))

    def load(self, layer: Linear, rows: slice, weight: torch.Tensor) -> None:
        for block, qweight, scale in quantised_rows(weight, self.device):
            layer.qweight[rows][block].copy_(qweight)
            layer.scale[rows][block].copy_(scale)
            layer.packed_scale[rows][block].copy_(scale)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // layer.in_features
        if rows <= self.PACKED_ROWS and self.packs(layer):
            flat = x.reshape(rows, layer.in_features).to(torch.bfloat16)
            out = torch._weight_int8pack_mm(flat, layer.qweight, layer.packed_scale)
            return out.to(x.dtype).view(*x.shape[:-1], layer.out_features)
        return cast(torch.Tensor, self.ops.int8_matmul(x, layer.qweight, layer.scale))

    def packs(self, layer: Linear) -> bool:
        """Whether torch's kernel may run: it takes whole vectors, does not check, and reads past the end of other sizes."""
        return self.device.type == "cpu" and layer.in_features % 32 == 0 and layer.out_features % 4 == 0
