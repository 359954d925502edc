"""Launches of the matrix-product kernels with given tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from modelrunner.kernels.gluon import require_tried
from modelrunner.kernels.linear.gemv import gemv_kernel
from modelrunner.kernels.linear.plan import LARGE, LATE_ROWS, AnyTiles, Gemv, Ring, Several, Stream, Tiles, Wide
from modelrunner.kernels.linear.several import WARP, several_kernel
from modelrunner.kernels.linear.stream import stream_kernel
from modelrunner.kernels.linear.tiles import sum_kernel, tile_kernel
from modelrunner.kernels.norm.rows import rms_norm
from modelrunner.kernels.pdl import hopper, pdl
from modelrunner.kernels.room import roomy, rows_with_room

try:
    require_tried()
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as RingDescriptor

    from modelrunner.kernels.linear.ring import ring_kernel
    from modelrunner.kernels.linear.wide import wide_kernel
except (ImportError, AttributeError):
    RINGS = False
else:
    RINGS = True

SUM_BLOCK, SUM_WARPS = 128, 1  # columns and warps of a program of `sum_kernel`,
SUM_MANY = 2**18  # sums; with more of them, four times as many each: more programs would not all find a place beside the next product's


@dataclass(frozen=True, slots=True)
class Extras:
    """Around a product: norm weight [K] and eps before; scale [N] of int8 weights, activation (0: none), residual [T, N] after."""

    norm: torch.Tensor | None = None
    eps: float = 0.0
    scale: torch.Tensor | None = None
    act: int = 0
    residual: torch.Tensor | None = None


PLAIN = Extras()


def run(tiles: AnyTiles, x: torch.Tensor, weight: torch.Tensor, extras: Extras = PLAIN) -> torch.Tensor:
    """residual + act(scale * (norm(x) @ weight.T)). x: [T, K], T >= 1; rows of x and of the residual may be strided, weight is contiguous.

    Returns [T, N] in x's dtype; for a gated activation weight is [2N, K], gate rows first.
    """
    if isinstance(tiles, Several):
        return _run_several(tiles, x, weight, extras)
    if isinstance(tiles, Gemv):
        return _run_gemv(tiles, x, weight, extras)
    return _run_tiles(tiles, x, weight, extras)


def sum_shape(rows: int, outputs: int) -> tuple[int, int]:
    """Columns and warps of a program of `sum_kernel`."""
    return (SUM_BLOCK, SUM_WARPS) if rows * outputs <= SUM_MANY else (4 * SUM_BLOCK, 4 * SUM_WARPS)


def _output(x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> torch.Tensor:
    return roomy((x.shape[0], weight.shape[0] // 2 if extras.act else weight.shape[0]), x.dtype, x.device)


def _run_gemv(tiles: Gemv, x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> torch.Tensor:
    out = _output(x, weight, extras)
    (rows, outputs), residual = out.shape, extras.residual
    strides = (x.stride(0), _stride(residual))
    gemv_kernel[(triton.cdiv(outputs, tiles.bn),)](
        x, extras.norm, weight, extras.scale, residual, out, outputs, *strides, extras.eps,
        T=rows, K=x.shape[1], BN=tiles.bn, BK=tiles.bk, ACT=extras.act, num_warps=tiles.warps, **pdl(x),
    )  # fmt: skip
    return out


def _run_several(tiles: Several, x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> torch.Tensor:
    out = _output(x, weight, extras)
    (rows, outputs), residual, lines = out.shape, extras.residual, WARP // tiles.c
    strides = (x.stride(0), _stride(residual))
    several_kernel[(triton.cdiv(outputs, lines * tiles.times),)](
        x, extras.norm, weight, extras.scale, residual, out, outputs, *strides, extras.eps,
        T=rows, K=x.shape[1], BN=lines, S=tiles.times, C=tiles.c, WARPS=tiles.warps, ACT=extras.act, num_warps=tiles.warps, **pdl(x),
    )  # fmt: skip
    return out


def _run_tiles(tiles: Tiles | Stream | Ring | Wide, x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> torch.Tensor:
    if extras.norm is not None and not (isinstance(tiles, Tiles) and tiles.fused_norm):
        late = x.shape[0] < LATE_ROWS and weight.numel() >= LARGE
        x, extras = rms_norm(x, extras.norm, extras.eps, late=late), replace(extras, norm=None)
    out, split = _output(x, weight, extras), tiles.split
    if split == 1:
        _launch(tiles, x, weight, extras, out, None)
        return out
    parts = torch.empty((split, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(tiles, x, weight, replace(extras, residual=None), None, parts)
    (rows, outputs), inner, residual = out.shape, x.shape[1], extras.residual
    block, warps = sum_shape(rows, outputs)
    sum_kernel[(rows, triton.cdiv(outputs, block))](
        parts, None if extras.norm is None else x, extras.scale, residual, out, rows, outputs, x.stride(0), _stride(residual), extras.eps,
        K=inner, BLOCK_K=triton.next_power_of_2(inner), BLOCK=block, SPLIT=split, ACT=extras.act, num_warps=warps, **pdl(x),
    )  # fmt: skip
    return out


def _launch(
    tiles: Tiles | Stream | Ring | Wide,
    x: torch.Tensor,
    weight: torch.Tensor,
    extras: Extras,
    out: torch.Tensor | None,
    parts: torch.Tensor | None,
) -> None:
    if isinstance(tiles, Ring):
        _launch_ring(tiles, x, weight, extras, out, parts)
    elif isinstance(tiles, Wide):
        _launch_wide(tiles, x, weight, extras, out, parts)
    elif isinstance(tiles, Stream):
        _launch_stream(tiles, x, weight, extras, out, parts)
    else:
        _launch_tiles(tiles, x, weight, extras, out, parts)


def _launch_tiles(
    tiles: Tiles, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor | None, parts: torch.Tensor | None
) -> None:
    """Into out, or plain sums into parts [split, T, N or 2N]."""
    rows, outputs, residual = x.shape[0], weight.shape[0] // (2 if extras.act else 1), extras.residual
    dependent = pdl(x)
    if x.is_cuda and not dependent["PDL"]:
        tiles = tiles.pipelined()
    tile_kernel[(triton.cdiv(outputs, tiles.bn), tiles.split, triton.cdiv(rows, tiles.bt))](
        x, extras.norm, weight, extras.scale, residual, out, parts, rows, outputs, x.stride(0), _stride(residual), extras.eps,
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=tiles.split, ACT=extras.act, HOLD=tiles.stages == 1,
        WARM=tiles.warm and dependent["PDL"], num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip


def _launch_stream(
    tiles: Stream, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor | None, parts: torch.Tensor | None
) -> None:
    """As `_launch_tiles`, without norm and scale."""
    rows, outputs, residual = x.shape[0], weight.shape[0] // (2 if extras.act else 1), extras.residual
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    dependent = pdl(x)
    if x.is_cuda and not hopper(x):
        tiles = tiles.late(extras.act != 0)
    x_blocks = None if tiles.early else _blocks(x, tiles.bt, tiles.bk, rows_with_room(x, tiles.bt))
    stream_kernel[(triton.cdiv(outputs, tiles.bn), tiles.split, triton.cdiv(rows, tiles.bt))](
        x_blocks, _blocks(weight, tiles.bn, tiles.bk), x, weight, residual, out, parts, rows, outputs, x.stride(0), _stride(residual),
        K=x.shape[1], BT=tiles.bt, BN=tiles.bn, BK=tiles.bk, SPLIT=tiles.split, ACT=extras.act,
        AHEAD=tiles.ahead if dependent["PDL"] else 0, EARLY=tiles.early,
        KEEP=tiles.keep and dependent["PDL"], num_warps=tiles.warps, num_stages=tiles.stages, **dependent,
    )  # fmt: skip


def _launch_ring(
    tiles: Ring, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor | None, parts: torch.Tensor | None
) -> None:
    """As `_launch_stream`."""
    (rows, inner), outputs, residual = x.shape, weight.shape[0] // (2 if extras.act else 1), extras.residual
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    x_blocks = _ring_blocks(x, tiles.bt, tiles.bk, rows_with_room(x, tiles.bt))
    ring_kernel[(triton.cdiv(rows, tiles.bt), triton.cdiv(outputs, tiles.bn), tiles.split)](
        x_blocks, _ring_blocks(weight, tiles.bn, tiles.bk), residual, out, parts, rows, outputs, _stride(residual),
        ACT=extras.act, STEPS=inner // (tiles.bk * tiles.split), W_SLOTS=tiles.w_slots, X_SLOTS=tiles.x_slots,
        REQUESTS=tiles.requests, num_warps=tiles.warps, maxnreg=tiles.registers, **pdl(x),
    )  # fmt: skip


def _launch_wide(
    tiles: Wide, x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor | None, parts: torch.Tensor | None
) -> None:
    """As `_launch_stream`; with an activation the outputs are a multiple of 8, and there are no parts."""
    (rows, inner), outputs, residual = x.shape, weight.shape[0] // (2 if extras.act else 1), extras.residual
    if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    if extras.act:
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        w = RingDescriptor(weight, [outputs // 8, 2, 8, inner], [8 * inner, outputs * inner, inner, 1], [4, 2, 8, tiles.bk], layout)
    else:
        w = _ring_blocks(weight, 64, tiles.bk)
    x_blocks = _ring_blocks(x, tiles.bt, tiles.bk, rows_with_room(x, tiles.bt * tiles.tiles))
    wide_kernel[(triton.cdiv(rows, tiles.bt * tiles.tiles), triton.cdiv(weight.shape[0], 64 * tiles.groups), tiles.split)](
        x_blocks, w, residual, out, parts, rows, outputs, _stride(residual), GROUPS=tiles.groups,
        TILES=tiles.tiles, STEPS=inner // (tiles.bk * tiles.split), SLOTS=tiles.slots, OTHERS=tiles.later, ACT=extras.act, num_warps=4,
        maxnreg=tiles.registers, **pdl(x),
    )  # fmt: skip


def _ring_blocks(matrix: torch.Tensor, rows: int, columns: int, there: int = 0) -> RingDescriptor:
    """In blocks [rows, columns]; there: rows that it has memory for, or 0."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return RingDescriptor(matrix, [there or matrix.shape[0], matrix.shape[1]], [matrix.stride(0), 1], [rows, columns], layout)


def _blocks(matrix: torch.Tensor, rows: int, columns: int, there: int = 0) -> TensorDescriptor:
    return TensorDescriptor(matrix, [there or matrix.shape[0], matrix.shape[1]], [matrix.stride(0), 1], [rows, columns])


def _stride(residual: torch.Tensor | None) -> int:
    return 0 if residual is None else residual.stride(0)
