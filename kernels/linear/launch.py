"""Launches of the matrix-product kernels with given tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from modelrunner.kernels.linear.gemv import gemv_kernel
from modelrunner.kernels.linear.plan import Gemv, Tiles
from modelrunner.kernels.linear.tiles import sum_kernel, tile_kernel
from modelrunner.kernels.norm.rows import rms_norm
from modelrunner.kernels.pdl import pdl

SUM_BLOCK = 256  # columns of a program of `sum_kernel`


@dataclass(frozen=True, slots=True)
class Extras:
    """Around a product: norm weight [K] and eps before; scale [N] of int8 weights, activation (0: none), residual [T, N] after."""

    norm: torch.Tensor | None = None
    eps: float = 0.0
    scale: torch.Tensor | None = None
    act: int = 0
    residual: torch.Tensor | None = None


PLAIN = Extras()


def run(tiles: Gemv | Tiles, x: torch.Tensor, weight: torch.Tensor, extras: Extras = PLAIN) -> torch.Tensor:
    """residual + act(scale * (norm(x) @ weight.T)). x: [T, K], T >= 1; rows of x and of the residual may be strided, weight is contiguous.

    Returns [T, N] in x's dtype; for a gated activation weight is [2N, K], gate rows first.
    """
    outputs = weight.shape[0] // 2 if extras.act else weight.shape[0]
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    if isinstance(tiles, Gemv):
        _run_gemv(tiles, x, weight, extras, out)
    else:
        _run_tiles(tiles, x, weight, extras, out)
    return out


def _run_gemv(tiles: Gemv, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    rows, outputs = out.shape
    residual = extras.residual
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    gemv_kernel[(triton.cdiv(outputs, tiles.bn),)](
        x, extras.norm, weight, extras.scale, residual, out, outputs, *strides, extras.eps,
        T=rows, K=x.shape[1], BN=tiles.bn, BK=tiles.bk, ACT=extras.act, num_warps=tiles.warps, **pdl(x),
    )  # fmt: skip


def _run_tiles(tiles: Tiles, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    rows, outputs = out.shape
    dependent = pdl(x)
    if x.is_cuda and not dependent["PDL"]:
        tiles = tiles.pipelined()
    inner, norm, residual, act, split = x.shape[1], extras.norm, extras.residual, extras.act, tiles.split
    if norm is not None and not tiles.fused_norm:
        x, norm = rms_norm(x, norm, extras.eps), None
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    before, after = (x, norm, weight, extras.scale, residual, out), (rows, outputs, *strides, extras.eps)
    options = {"K": inner, "ACT": act, "num_warps": tiles.warps, "num_stages": tiles.stages, **dependent}
    options |= {"BT": tiles.bt, "BN": tiles.bn, "BK": tiles.bk, "HOLD": tiles.stages == 1, "WARM": tiles.warm and dependent["PDL"]}
    grid = (triton.cdiv(outputs, tiles.bn), split, triton.cdiv(rows, tiles.bt))
    if split == 1:
        tile_kernel[grid](*before, None, *after, SPLIT=1, **options)
    else:
        part = torch.empty((split, rows, weight.shape[0]), dtype=torch.float32, device=x.device)
        tile_kernel[grid](*before, part, *after, SPLIT=split, **options)
        sum_kernel[(rows, triton.cdiv(outputs, SUM_BLOCK))](
            part, x, norm, extras.scale, residual, out, *after,
            K=inner, BLOCK_K=triton.next_power_of_2(inner), BLOCK=SUM_BLOCK, SPLIT=split, ACT=act, num_warps=2, **dependent,
        )  # fmt: skip
