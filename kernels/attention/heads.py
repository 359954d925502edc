"""Norm and rotation of heads, for kernels that take the projection's output as it is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_factors(cos_sin_ptr, token, cos_sin_token, dim, R: tl.constexpr):
    """Factors of a component and of the one it is paired with: cosine and signed sine [B, BLOCK_D]; 1 and 0 past the first R components.

    token: [B, 1] int64. dim: [1, BLOCK_D]. cos_sin: [T, R] float32.
    """
    HALF: tl.constexpr = R // 2
    at = cos_sin_ptr + token * cos_sin_token + dim % HALF
    cos = tl.load(at, mask=dim < R, other=1.0)
    sin = tl.load(at + HALF, mask=dim < R, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def scaled(x, rstd, weight, DTYPE: tl.constexpr):
    """The normed value of x (float32), rounded as `kernels.norm.reference.rms_norm` does: with a weight of float32, once."""
    if weight.dtype == tl.float32:
        return (x * rstd * weight).to(DTYPE).to(tl.float32)
    return ((x * rstd).to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def rotated(x_ptr, at, mask, dim, norm_ptr, cos, sin, eps, D: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads [B, BLOCK_D] in the model's type. at: [B, 1], where they begin. mask: [B, BLOCK_D]. cos, sin: of `turn_factors`."""
    HALF: tl.constexpr = R // 2
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    partner = tl.where(dim < HALF, dim + HALF, tl.where(dim < R, dim - HALF, dim))
    x = tl.load(x_ptr + at + dim, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + at + partner, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = tl.load(norm_ptr + dim, mask=dim < D, other=0.0)
        other = tl.load(norm_ptr + partner, mask=dim < D, other=0.0)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x, y = scaled(x, rstd, weight, DTYPE), scaled(y, rstd, other, DTYPE)
    return (x * cos + y * sin).to(DTYPE)
