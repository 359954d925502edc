"""The operations of `linear` on CUDA devices: few rows by the kernels here, many by the vendor's library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from modelrunner.kernels.activation.gated import GELU_TANH, SILU, gelu_tanh_mul, silu_mul
from modelrunner.kernels.linear.launch import PLAIN, Extras, run
from modelrunner.kernels.linear.plan import MANY_ROWS, Gemv, Stream, Tiles, added, plan
from modelrunner.kernels.linear.reference import int8_matmul as reference_int8_matmul
from modelrunner.kernels.norm.rows import rms_norm
from modelrunner.kernels.pdl import pdl

ACTIVATIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu_mul": (SILU, silu_mul),
    "gelu_tanh_mul": (GELU_TANH, gelu_tanh_mul),
}


def _choose(x: torch.Tensor, weight: torch.Tensor, outputs: int, gated: bool, norm: bool) -> Gemv | Tiles | Stream | None:
    """Tiles for x [T, K], or None for the vendor's library."""
    rows = x.shape[0]
    if rows >= MANY_ROWS.stop or rows == 0 or x.stride(1) != 1 or not weight.is_contiguous():
        return None
    streams = weight.dtype == x.dtype and weight.data_ptr() % 16 == 0 and (not x.is_cuda or pdl(x)["PDL"])
    return plan(rows, outputs, x.shape[1], 8 * x.element_size(), gated, norm, x.dtype == torch.float16, streams)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`reference.matmul`."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    tiles = _choose(flat, weight, weight.shape[0], False, False) if x.dtype == weight.dtype else None
    if tiles is None:
        return linear(x, weight)
    out = run(tiles, flat, weight, PLAIN)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def _choose_added(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Gemv | Tiles | Stream | None:
    """`_choose` for a product that is added to a residual."""
    tiles = _choose(x, weight, weight.shape[0], False, False) if residual.stride(-1) == 1 else None
    if tiles is None and x.stride(1) == residual.stride(-1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype:
        tiles = added(x.shape[0], *weight.shape, 8 * x.element_size())
    return tiles


def matmul_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x @ weight.T, rounded once. x: [T, K]; weight: [N, K]; residual: [T, N], or a bias [N], then by the vendor's library."""
    tiles = None if residual.dim() == 1 else _choose_added(x, weight, residual)
    if tiles is None:
        return torch.addmm(residual, x, weight.t())
    return run(tiles, x, weight, Extras(residual=residual))


def matmul_add_in_place(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`matmul_add`; the vendor's library, which otherwise begins with a copy of the residual, puts the sum in its place."""
    tiles = _choose_added(x, weight, residual)
    if tiles is None:
        return residual.addmm_(x, weight.t())
    return run(tiles, x, weight, Extras(residual=residual))


def norm_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """matmul(rms_norm(x, norm_weight, eps), weight). x: [T, K]; weight: [N, K]. Returns [T, N]."""
    tiles = _choose(x, weight, weight.shape[0], False, True)
    if tiles is None:
        return linear(rms_norm(x, norm_weight, eps), weight)
    return run(tiles, x, weight, Extras(norm=norm_weight, eps=eps))


def norm_gated_matmul(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(matmul(rms_norm(x, norm_weight, eps), weight)). x: [T, K]; weight: [2I, K], gate rows first. Returns [T, I].

    activation: "silu_mul" or "gelu_tanh_mul".
    """
    act, function = ACTIVATIONS[activation]
    tiles = _choose(x, weight, weight.shape[0] // 2, True, True)
    if tiles is None:
        return function(linear(rms_norm(x, norm_weight, eps), weight))
    return run(tiles, x, weight, Extras(norm=norm_weight, eps=eps, act=act))


def int8_matmul(x: torch.Tensor, qweight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`reference.int8_matmul`, for few rows without widening the weights in memory."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    tiles = _choose(flat, qweight, qweight.shape[0], False, False)
    if tiles is None:
        return reference_int8_matmul(x, qweight, scale)
    out = run(tiles, flat, qweight, Extras(scale=scale))
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
