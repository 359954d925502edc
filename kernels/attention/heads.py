"""Norm and rotation of heads, for a kernel that takes the projection's output as it is."""

from __future__ import annotations

import triton
import triton.language as tl

from modelrunner.kernels.norm.rows import scaled


@triton.jit
def partner_of(dim, R: tl.constexpr):
    """The component that each of dim [D] is rotated against: R / 2 further on or back; past the first R components itself."""
    HALF: tl.constexpr = R // 2
    partner = tl.where(dim < HALF, dim + HALF, tl.where(dim < R, dim - HALF, dim))
    if HALF % 16 == 0:  # runs of 16 stay together, which loads of several components at a time need to know
        partner = tl.max_contiguous(tl.multiple_of(partner, 16), 16)
    return partner


@triton.jit
def turn_factors(cos_sin_ptr, dim, R: tl.constexpr):
    """Factors of components dim [1, D] and of their partners: cosine and signed sine [B, D]; 1 and 0 past the first R components.

    cos_sin_ptr: [B, 1], where a token's R float32 begin.
    """
    HALF: tl.constexpr = R // 2
    cos = tl.load(cos_sin_ptr + dim % HALF, mask=dim < R, other=1.0)
    sin = tl.load(cos_sin_ptr + HALF + dim % HALF, mask=dim < R, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def rotated(x, y, weight_ptr, dim, partner, cos, sin, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads x [B, D] and the same by their partners, y, normed (unless HAS_NORM is False) and rotated, in x's type.

    weight_ptr: [B, 1], where the norm's weight begins. dim, partner: [1, D]. cos, sin: [B, D] of `turn_factors`.
    """
    a, b = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(weight_ptr + dim, mask=dim < D, other=0.0)
        other_weight = tl.load(weight_ptr + partner, mask=dim < D, other=0.0)
        rstd = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        a = scaled(a, rstd, weight, x.dtype).to(tl.float32)
        b = scaled(b, rstd, other_weight, x.dtype).to(tl.float32)
    return (a * cos + b * sin).to(x.dtype)
