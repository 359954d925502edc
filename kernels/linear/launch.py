"""Launches of the matrix-product kernels with given tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    elif (parts := multiply(tiles, x, weight, extras, out)) is not None:
        add(parts, x.shape[1], extras, out)
    return out


def _run_gemv(tiles: Gemv, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor) -> None:
    rows, outputs = out.shape
    residual = extras.residual
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    gemv_kernel[(triton.cdiv(outputs, tiles.bn),)](
        x, extras.norm, weight, extras.scale, residual, out, outputs, *strides, extras.eps,
        T=rows, K=x.shape[1], BN=tiles.bn, BK=tiles.bk, ACT=extras.act, num_warps=tiles.warps, **pdl(x),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """A product in parts that are yet to be added, in their order.

    sums: float32 [split, T, N or 2N]. squares: float32 [split, T]: sums of x's squares where the sums want 1 / rms of x.
    """

    sums: torch.Tensor
    squares: torch.Tensor | None


def multiply(tiles: Tiles | Stream, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor) -> Parts | None:
    """Writes out [T, N], or returns its parts, to which the rest of `extras` is yet to be done."""
    if extras.norm is not None and not (isinstance(tiles, Tiles) and tiles.fused_norm):
        x, extras = rms_norm(x, extras.norm, extras.eps), replace(extras, norm=None)
    split, rows, width = tiles.split, x.shape[0], weight.shape[0]
    parts = None
    if split > 1:
        numbers = torch.empty((split * rows * (width + (extras.norm is not None)),), dtype=torch.float32, device=x.device)
        sums, squares = numbers[: split * rows * width].view(split, rows, width), numbers[split * rows * width :]
        parts = Parts(sums, None if extras.norm is None else squares.view(split, rows))
    (_launch_stream if isinstance(tiles, Stream) else _launch_tiles)(tiles, x, weight, extras, out, parts)
    return parts


def _launch_tiles(tiles: Tiles, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor, parts: Parts | None) -> None:
    rows, outputs = out.shape
    dependent = pdl(x)
    if x.is_cuda and not dependent["PDL"]:
        tiles = tiles.pipelined()
    residual, sums, squares = extras.residual, *((None, None) if parts is None else (parts.sums, parts.squares))
    tile_kernel[(triton.cdiv(outputs, tiles.bn), tiles.split, triton.cdiv(rows, tiles.bt))](
        x, extras.norm, weight, extras.scale, residual, out, sums, squares, rows, outputs, x.stride(0), _stride(residual), extras.eps,
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=tiles.split, ACT=extras.act, HOLD=tiles.stages == 1,
        WARM=tiles.warm and dependent["PDL"], num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip


def _launch_stream(tiles: Stream, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor, parts: Parts | None) -> None:
    rows, outputs = out.shape
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    dependent, residual, sums = pdl(x), *((extras.residual, None) if parts is None else (None, parts.sums))
    blocks = [TensorDescriptor(m, [*m.shape], [m.stride(0), 1], [size, tiles.bk]) for m, size in ((x, tiles.bt), (weight, tiles.bn))]
    stream_kernel[(triton.cdiv(outputs, tiles.bn), tiles.split, triton.cdiv(rows, tiles.bt))](
        *blocks, weight, residual, out, sums, rows, outputs, _stride(residual),
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=tiles.split, ACT=extras.act,
        AHEAD=tiles.ahead if dependent["PDL"] else 0, num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip


def add(parts: Parts, inner: int, extras: Extras, out: torch.Tensor) -> None:
    """Writes out [T, N] from its parts. inner: K."""
    (rows, outputs), residual = out.shape, extras.residual
    sum_kernel[(rows, triton.cdiv(outputs, SUM_BLOCK))](
        parts.sums, parts.squares, extras.scale, residual, out, rows, outputs, _stride(residual), extras.eps,
        K=inner, BLOCK=SUM_BLOCK, SPLIT=parts.sums.shape[0], ACT=extras.act, num_warps=2, **pdl(out),
    )  # fmt: skip


def _stride(residual: torch.Tensor | None) -> int:
    return 0 if residual is None else residual.stride(0)


def run_normed(
    tiles: Stream | Tiles, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total) for total = residual + x @ weight.T. Shapes and strides as in `run`."""
    rows, outputs = x.shape[0], weight.shape[0]
    total = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    parts = multiply(tiles, x, weight, Extras(residual=residual), total)
    if parts is None:
        return rms_norm(total, norm, eps), total
    normed, block = torch.empty_like(total), triton.next_power_of_2(outputs)
    sum_norm_kernel[(rows,)](
        parts.sums, norm, residual, total, normed, rows, outputs, residual.stride(0), eps,
        BLOCK=block, SPLIT=tiles.split, num_warps=max(1, min(16, block // 256)), **pdl(x),
    )  # fmt: skip
    return normed, total
