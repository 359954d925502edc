"""Linear schemes for a CPU whose weights are kept only in the order that its kernels read them, those of FBGEMM or oneDNN.

A layer's parts are staged as they are loaded, and packed once the last one has come; new weights for one part unpack the layer first. So
weights exist twice for one layer at a time. A layer that is tied to an embedding keeps a packed copy of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from modelrunner.host_memory import mapped_zeros
from modelrunner.kernels.linear import fbgemm, onednn
from modelrunner.linear import Linear, LinearScheme, Norm, PlainScheme, quantised_rows
from modelrunner.ops import Ops

GATED = {"silu_mul": False, "gelu_tanh_mul": True}  # what the products' gate does, by the activation's name: whether it is GELU
# What float32 packs: layers of so many weights and outputs. With fewer of them a product of few rows, or of any number, is slower that way.
LARGE = 1 << 20
WIDE = 2048

Staged = TypeVar("Staged")


@dataclass
class Storage(Generic[Staged]):
    """The weight of one layer. packed: what products read; None while something is staged. staged: the weight to be packed, whole.

    loaded: end of each run of rows that was staged, by its start.
    """

    packed: Any = None
    staged: Staged | None = None
    loaded: dict[int, int] = field(default_factory=dict)


class PackedScheme(LinearScheme, Generic[Staged]):
    """What packed schemes share: staging, packing and unpacking."""

    def create(self, layer: Linear) -> None:
        layer.__dict__["storage"] = Storage()

    def load(self, layer: Linear, rows: slice, weight: torch.Tensor) -> None:
        storage: Storage[Staged] = layer.__dict__["storage"]
        if storage.staged is None:
            storage.staged = self.blank(layer) if storage.packed is None else self.unpack(storage.packed)
            storage.packed = None
        self.stage(storage.staged, rows, weight)
        storage.loaded[rows.start] = rows.stop
        if sum(end - start for start, end in storage.loaded.items()) >= layer.out_features:
            self.packed(layer)

    def packed(self, layer: Linear) -> Any:
        """The layer's packed weight; what is staged is packed first."""
        storage: Storage[Staged] = layer.__dict__["storage"]
        if storage.packed is None:
            staged = self.blank(layer) if storage.staged is None else storage.staged
            storage.packed, storage.staged = self.pack(staged), None
            storage.loaded.clear()
        return storage.packed

    @abstractmethod
    def blank(self, layer: Linear) -> Staged:
        """Storage for the layer's weight before it is packed: zeros."""

    @abstractmethod
    def stage(self, staged: Staged, rows: slice, weight: torch.Tensor) -> None:
        """Store `weight` [rows, in_features] as those rows of `staged`, in place."""

    @abstractmethod
    def pack(self, staged: Staged) -> Any: ...

    @abstractmethod
    def unpack(self, packed: Any) -> Staged: ...


class PackedHalfScheme(PackedScheme[torch.Tensor]):
    """Weights of 16 bits as float16, products and sums in float32.

    Weights are rounded to the model's type first. float16 holds every bfloat16 between 2^-14 and 65504 as it is, and smaller ones to within
    2^-25. A layer with larger weights, or with some that are not finite, keeps its weight in the model's type, and runs as `matmul`.
    """

    name = "packed"

    def blank(self, layer: Linear) -> torch.Tensor:
        return mapped_zeros(torch.float32, layer.out_features, layer.in_features)

    def stage(self, staged: torch.Tensor, rows: slice, weight: torch.Tensor) -> None:
        staged[rows].copy_(weight.to(self.dtype))

    def pack(self, staged: torch.Tensor) -> Any:
        return fbgemm.pack_half(staged) if fbgemm.fits_half(staged) else staged.to(self.dtype)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.float() if isinstance(packed, torch.Tensor) else fbgemm.unpack_half(packed)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed(layer)
        if isinstance(packed, torch.Tensor):
            return cast(torch.Tensor, self.ops.matmul(x, packed))
        return fbgemm.half_matmul(x, packed)

    def apply_normed(self, layer: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        packed = self.packed(layer)
        if isinstance(packed, torch.Tensor):
            return super().apply_normed(layer, x, norm)
        return fbgemm.half_norm_matmul(x, norm.weight, norm.eps, packed)

    def apply_added(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        packed = self.packed(layer)
        if isinstance(packed, torch.Tensor):
            return super().apply_added(layer, x, residual)
        return fbgemm.half_matmul_add(x, packed, residual)

    def apply_gated(self, layer: Linear, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        packed = self.packed(layer)
        if isinstance(packed, torch.Tensor) or activation not in GATED:
            return super().apply_gated(layer, x, norm, activation)
        return fbgemm.half_norm_gated_matmul(x, norm.weight, norm.eps, packed, GATED[activation])


class PackedFloatScheme(PackedScheme[torch.Tensor]):
    """float32 weights as they are: those of large, wide layers packed, which makes products of 2 rows and more faster, and those of one
    row a tenth slower. Others are as in `PlainScheme`."""

    name = "packed"

    def __init__(self, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(ops, dtype, device)
        self._plain = PlainScheme(ops, dtype, device)

    @staticmethod
    def packs(layer: Linear) -> bool:
        return layer.out_features >= WIDE and layer.in_features * layer.out_features >= LARGE

    def create(self, layer: Linear) -> None:
        if self.packs(layer):
            super().create(layer)
        else:
            self._plain.create(layer)

    def load(self, layer: Linear, rows: slice, weight: torch.Tensor) -> None:
        if self.packs(layer):
            super().load(layer, rows, weight)
        else:
            self._plain.load(layer, rows, weight)

    def blank(self, layer: Linear) -> torch.Tensor:
        return mapped_zeros(torch.float32, layer.out_features, layer.in_features)

    def stage(self, staged: torch.Tensor, rows: slice, weight: torch.Tensor) -> None:
        staged[rows].copy_(weight)

    def pack(self, staged: torch.Tensor) -> Any:
        return onednn.pack(staged)

    def unpack(self, packed: Any) -> torch.Tensor:
        return onednn.unpack(packed)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return onednn.matmul(x, self.packed(layer)) if self.packs(layer) else self._plain.apply(layer, x)

    def apply_normed(self, layer: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if not self.packs(layer):
            return self._plain.apply_normed(layer, x, norm)
        return onednn.norm_matmul(x, norm.weight, norm.eps, self.packed(layer))

    def apply_added(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not self.packs(layer):
            return self._plain.apply_added(layer, x, residual)
        return onednn.matmul_add(x, self.packed(layer), residual)

    def apply_gated(self, layer: Linear, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        if not self.packs(layer):
            return self._plain.apply_gated(layer, x, norm, activation)
        if activation not in GATED:
            return super().apply_gated(layer, x, norm, activation)
        return onednn.norm_gated_matmul(x, norm.weight, norm.eps, self.packed(layer), GATED[activation])


class PackedInt8Scheme(PackedScheme[tuple[torch.Tensor, torch.Tensor]]):
    """8-bit weights with a scale for each output, as `Int8Scheme` makes them, and activations of 14 bits, see `fbgemm.int8_matmul`."""

    name = "int8"

    def blank(self, layer: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        return mapped_zeros(torch.int8, layer.out_features, layer.in_features), torch.zeros(layer.out_features)

    def stage(self, staged: tuple[torch.Tensor, torch.Tensor], rows: slice, weight: torch.Tensor) -> None:
        for block, qweight, scale in quantised_rows(weight, self.device):
            staged[0][rows][block].copy_(qweight)
            staged[1][rows][block].copy_(scale)

    def pack(self, staged: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return fbgemm.pack_int8(*staged)

    def unpack(self, packed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return fbgemm.unpack_int8(packed)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        out = fbgemm.int8_matmul(x.reshape(-1, layer.in_features), self.packed(layer))
        return out.view(*x.shape[:-1], layer.out_features)

    def apply_normed(self, layer: Linear, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if x.dim() != 2:
            return super().apply_normed(layer, x, norm)
        return fbgemm.int8_norm_matmul(x, norm.weight, norm.eps, self.packed(layer))

    def apply_added(self, layer: Linear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return fbgemm.int8_matmul_add(x, self.packed(layer), residual) if x.dim() == 2 else super().apply_added(layer, x, residual)

    def apply_gated(self, layer: Linear, x: torch.Tensor, norm: Norm, activation: str) -> torch.Tensor:
        if x.dim() != 2 or activation not in GATED:
            return super().apply_gated(layer, x, norm, activation)
        return fbgemm.int8_norm_gated_matmul(x, norm.weight, norm.eps, self.packed(layer), GATED[activation])
