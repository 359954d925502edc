"""RMS norms in Triton: one launch, rows anywhere in memory, and the residual sum with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.norm.reference import rms_norm as reference_rms_norm
from modelrunner.kernels.pdl import pdl
from modelrunner.kernels.room import roomy

MAX_WIDTH = 16384  # of a row that one program holds
TILE = 2048  # values of a program where rows are short
FIXED_ROWS = 1024  # as many as all launches take themselves to have where rows must not depend on their number


@triton.jit
def scaled(x, rstd, weight, dtype: tl.constexpr):
    """The normed value of x (float32), rounded as the reference does: quotient and product for a weight of 16 bits, else the product."""
    if weight.dtype == tl.float32:
        return (x * rstd * weight).to(dtype)
    return ((x * rstd).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, rows, inner, x_outer, x_inner, r_outer, r_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r = (r // inner, r % inner) of x lies at r // inner * x_outer + r % inner * x_inner. residual_ptr None: no sum, no total.

    LATE: the next launch may start once x is there.
    """
    if PDL and not LATE:
        gdc_launch_dependents()
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < D)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
    if PDL:
        gdc_wait()
        if LATE:
            gdc_launch_dependents()
    x = tl.load(x_ptr + row // inner * x_outer + row % inner * x_inner + column, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row // inner * r_outer + row % inner * r_inner + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * D + column, x, mask=mask)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(out_ptr + row * D + column, scaled(wide, rstd[:, None], weight, dtype), mask=mask)


def row_strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(x or a copy, inner, outer stride, inner stride) such that row r of x [..., D] lies as `norm_kernel` says."""
    size, stride = x.shape, x.stride()
    if x.dim() == 2 and stride[1] == 1:
        return x, 1, stride[0], 0
    if x.dim() == 3 and stride[2] == 1:
        return x, size[1], stride[0], stride[1]
    if x.dim() == 1 and stride[0] == 1:
        return x, 1, 0, 0
    x = x.contiguous()
    return x, 1, x.shape[-1], 0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, fixed: bool = False, late: bool = False) -> torch.Tensor:
    """`reference.rms_norm` in one launch. Rows of x [..., D] may be strided, e.g. the heads of a slice of a fused product.

    fixed: in programs of one shape, however many rows there are, so that each row is summed in one order. late: the next launch, which
    would ask for as many weights as memory brings, may start once x is there: what little x is would have to wait for them.
    """
    if x.shape[-1] > MAX_WIDTH:
        return reference_rms_norm(x, weight, eps)
    out = roomy(x.shape, x.dtype, x.device) if x.dim() == 2 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, inner, outer_stride, inner_stride = row_strides(x)
    _launch(x, None, weight, out, None, inner, (outer_stride, inner_stride, 0, 0), eps, fixed, late)
    return out


def fixed_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` whose rows do not depend on how many there are."""
    return rms_norm(x, weight, eps, fixed=True)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + residual; returns (rms_norm(total), total), both new. x, residual: [..., D] of one shape and dtype."""
    if x.shape[-1] > MAX_WIDTH or x.shape != residual.shape or x.dtype != residual.dtype:
        total = x + residual
        return rms_norm(total, weight, eps), total
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    x, inner, outer_stride, inner_stride = row_strides(x)
    residual, r_inner, r_outer_stride, r_inner_stride = row_strides(residual)
    if r_inner != inner:
        x, residual, inner = x.contiguous(), residual.contiguous(), 1
        outer_stride, inner_stride, r_outer_stride, r_inner_stride = x.shape[-1], 0, x.shape[-1], 0
    _launch(x, residual, weight, out, total, inner, (outer_stride, inner_stride, r_outer_stride, r_inner_stride), eps)
    return out, total


def shape(rows: int, width: int) -> tuple[int, int, int]:
    """(BLOCK, ROWS, warps) of a launch."""
    block = triton.next_power_of_2(width)
    tile = 1 if rows <= 512 else max(1, TILE // block)
    return block, tile, min(16, max(1, block * tile // 512))


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    inner: int,
    strides: tuple[int, int, int, int],
    eps: float,
    fixed: bool = False,
    late: bool = False,
) -> None:
    width = out.shape[-1]
    rows = out.numel() // max(width, 1)
    if rows == 0 or width == 0:
        return
    block, tile, warps = shape(FIXED_ROWS if fixed else rows, width)
    norm_kernel[(triton.cdiv(rows, tile),)](
        x, residual, weight.contiguous(), out, total, rows, inner, *strides, eps,
        D=width, BLOCK=block, ROWS=tile, LATE=late, num_warps=warps, **pdl(x),
    )  # fmt: skip
