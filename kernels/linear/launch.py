"""Launches of the matrix-product kernels with given tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from modelrunner.kernels.linear.gemv import gemv_kernel
from modelrunner.kernels.linear.plan import Gemv, Stream, Tiles
from modelrunner.kernels.linear.stream import stream_kernel, sum_norm_kernel
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


def run(tiles: Gemv | Tiles | Stream, x: torch.Tensor, weight: torch.Tensor, extras: Extras = PLAIN) -> torch.Tensor:
    """residual + act(scale * (norm(x) @ weight.T)). x: [T, K], T >= 1; rows of x and of the residual may be strided, weight is contiguous.

    Returns [T, N] in x's dtype; for a gated activation weight is [2N, K], gate rows first.
    """
    outputs = weight.shape[0] // 2 if extras.act else weight.shape[0]
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    if isinstance(tiles, Gemv):
        _run_gemv(tiles, x, weight, extras, out)
    elif isinstance(tiles, Stream):
        _run_stream(tiles, x, weight, extras, out)
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
    inner, norm, residual = x.shape[1], extras.norm, extras.residual
    if norm is not None and not tiles.fused_norm:
        x, norm = rms_norm(x, norm, extras.eps), None
    part = _multiply_tiles(tiles, x, norm, weight, extras, out)
    if part is not None:
        strides = (x.stride(0), 0 if residual is None else residual.stride(0))
        sum_kernel[(rows, triton.cdiv(outputs, SUM_BLOCK))](
            part, x, norm, extras.scale, residual, out, rows, outputs, *strides, extras.eps,
            K=inner, BLOCK_K=triton.next_power_of_2(inner), BLOCK=SUM_BLOCK, SPLIT=tiles.split, ACT=extras.act, num_warps=2, **pdl(x),
        )  # fmt: skip


def _multiply_tiles(
    tiles: Tiles, x: torch.Tensor, norm: torch.Tensor | None, weight: torch.Tensor, extras: Extras, out: torch.Tensor
) -> torch.Tensor | None:
    """Writes `out`, or returns its parts [split, T, N or 2N] in float32."""
    rows, outputs = out.shape
    dependent = pdl(x)
    if x.is_cuda and not dependent["PDL"]:
        tiles = tiles.pipelined()
    residual, split = extras.residual, tiles.split
    part = torch.empty((split, rows, weight.shape[0]), dtype=torch.float32, device=x.device) if split > 1 else None
    tile_kernel[(triton.cdiv(outputs, tiles.bn), split, triton.cdiv(rows, tiles.bt))](
        x, norm, weight, extras.scale, residual, out, part, rows, outputs, x.stride(0), 0 if residual is None else residual.stride(0),
        extras.eps, K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=split, ACT=extras.act, HOLD=tiles.stages == 1,
        WARM=tiles.warm and dependent["PDL"], num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip
    return part


def _run_stream(tiles: Stream, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    rows, outputs = out.shape
    if extras.norm is not None:
        x = rms_norm(x, extras.norm, extras.eps)
    part = _multiply_stream(tiles, x, weight, extras.act, extras.residual, out)
    if part is not None:
        stride = 0 if extras.residual is None else extras.residual.stride(0)
        sum_kernel[(rows, triton.cdiv(outputs, SUM_BLOCK))](
            part, x, None, None, extras.residual, out, rows, outputs, x.stride(0), stride, 0.0,
            K=x.shape[1], BLOCK_K=16, BLOCK=SUM_BLOCK, SPLIT=tiles.split, ACT=extras.act, num_warps=2, **pdl(x),
        )  # fmt: skip


def _multiply_stream(
    tiles: Stream, x: torch.Tensor, weight: torch.Tensor, act: int, residual: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor | None:
    """Writes `out`, or returns its parts [split, T, N or 2N] in float32."""
    rows, outputs = out.shape
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    dependent, split = pdl(x), tiles.split
    part = torch.empty((split, rows, weight.shape[0]), dtype=torch.float32, device=x.device) if split > 1 else None
    stride = 0 if residual is None else residual.stride(0)
    blocks = [TensorDescriptor(m, [*m.shape], [m.stride(0), 1], [size, tiles.bk]) for m, size in ((x, tiles.bt), (weight, tiles.bn))]
    stream_kernel[(triton.cdiv(outputs, tiles.bn), split, triton.cdiv(rows, tiles.bt))](
        *blocks, weight, residual if split == 1 else None, out, part, rows, outputs, stride,
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=split, ACT=act,
        AHEAD=tiles.ahead if dependent["PDL"] else 0, num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip
    return part


def run_normed(
    tiles: Stream | Tiles, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total) for total = residual + x @ weight.T. Shapes and strides as in `run`."""
    rows, outputs = x.shape[0], weight.shape[0]
    total, normed = (torch.empty((rows, outputs), dtype=x.dtype, device=x.device) for _ in range(2))
    if tiles.split == 1:
        run_one = run(tiles, x, weight, Extras(residual=residual))
        return rms_norm(run_one, norm, eps), run_one
    if isinstance(tiles, Stream):
        part = _multiply_stream(tiles, x, weight, 0, None, total)
    else:
        part = _multiply_tiles(tiles, x, None, weight, Extras(), total)
    block = triton.next_power_of_2(outputs)
    sum_norm_kernel[(rows,)](
        part, norm, residual, total, normed, rows, outputs, residual.stride(0), eps,
        BLOCK=block, SPLIT=tiles.split, num_warps=max(1, min(16, block // 256)), **pdl(x),
    )  # fmt: skip
    return normed, total
