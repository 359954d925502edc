"""Gated activations in Triton: one launch over [..., 2I]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.norm.rows import row_strides
from modelrunner.kernels.pdl import pdl

SILU, GELU_TANH = 1, 2


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """act(gate) * up for values of the model's type, rounded as the reference rounds: the activation, then the product."""
    wide = gate.to(tl.float32)
    z = wide
    if ACT == 2:  # x / 2 * (1 + tanh(z / 2)) = x * sigmoid(z)
        z = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    act = (wide / (1.0 + tl.exp(-z))).to(gate.dtype)
    return (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def gated_kernel(x_ptr, out_ptr, inner, x_outer, x_inner, width, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (r, c): columns c * BLOCK onwards of row r, which lies at r // inner * x_outer + r % inner * x_inner."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_ptr = x_ptr + row // inner * x_outer + row % inner * x_inner + column
    if PDL:
        gdc_wait()
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + width, mask=mask, other=0.0)
    tl.store(out_ptr + row * width + column, gated(gate, up, ACT), mask=mask)


def _launch(gate_up: torch.Tensor, act: int) -> torch.Tensor:
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    x, inner, outer_stride, inner_stride = row_strides(gate_up)
    block = min(1024, triton.next_power_of_2(width))
    grid = (out.numel() // width, triton.cdiv(width, block))
    warps = max(1, block // 256)
    gated_kernel[grid](x, out, inner, outer_stride, inner_stride, width, ACT=act, BLOCK=block, num_warps=warps, **pdl(x))
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`reference.silu_mul` in one launch."""
    return _launch(gate_up, SILU)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`reference.gelu_tanh_mul` in one launch."""
    return _launch(gate_up, GELU_TANH)
