"""From the projection's output to attention in one pass: norm and rotation of heads, and the step's keys and values into the cache.

Letters: T tokens, HQ query heads, HK key and value heads, D head size, R rotated components of a head, B heads of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.device import launch_options, next_power_of_2
from modelrunner.kernels.attention.index import rows_per_page
from modelrunner.kernels.attention.scaled import stored


@triton.jit
def normed(x, factor, weight_ptr, other_ptr, dim, mask, is_query, is_key):
    """x [B, C] times the norm's factor [B] and weight, rounded as `kernels.norm.reference.rms_norm` does; heads of values stay.

    x: float32 values of the model's type. dim: [C] components of the head.
    """
    weight = tl.where(
        is_query[:, None],
        tl.load(weight_ptr + dim, mask=mask, other=0.0)[None, :],
        tl.load(other_ptr + dim, mask=mask, other=0.0)[None, :],
    )
    return x * factor[:, None], weight


@triton.jit
def rounded_product(quotient, weight, DTYPE: tl.constexpr):
    """A weight of float32 multiplies before rounding, one of the model's type after it. Returns float32."""
    if weight.dtype == tl.float32:
        return (quotient * weight).to(DTYPE).to(tl.float32)
    else:
        return (quotient.to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def store_heads(
    out_ptr, cache_ptr, x, token, head, place, written, scale, dim, mask,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Queries to out, keys and values (one after the other in the cache) to the token's place. x: [B, C]. head, scale: [B]. dim: [C]."""
    query = (head < HQ)[:, None] & mask[None, :]
    tl.store(out_ptr + token * (HQ * D) + head[:, None] * D + dim[None, :], x.to(out_ptr.dtype.element_ty), mask=query)
    other = ((head >= HQ) & (head < HQ + 2 * HK) & written)[:, None] & mask[None, :]
    kept = stored(x, scale[:, None], cache_ptr.dtype.element_ty, HAS_SCALES)
    tl.store(cache_ptr + place + (head[:, None] - HQ) * D + dim[None, :], kept, mask=other)


@triton.jit
def norm_rotate_write(
    qkv_ptr,
    out_ptr,
    cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    slots_ptr,
    scales_ptr,
    eps,
    qkv_token,
    cos_sin_token,
    page_rows,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block of heads): the first R components in two halves that rotate against each other, and the rest."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_query, is_key, there = head < HQ, (head >= HQ) & (head < HQ + HK), (head < HQ + 2 * HK)[:, None]
    dim, rest = tl.arange(0, BLOCK_HALF), R + tl.arange(0, BLOCK_REST)
    in_half, in_rest = dim < HALF, rest < D
    x = qkv_ptr + token * qkv_token + head[:, None] * D
    if PDL:
        gdc_wait()
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_sin_ptr + token * cos_sin_token + dim, mask=in_half, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + token * cos_sin_token + HALF + dim, mask=in_half, other=0.0)[None, :]
    a = tl.load(x + dim[None, :], mask=there & in_half[None, :], other=0.0).to(tl.float32)
    b = tl.load(x + HALF + dim[None, :], mask=there & in_half[None, :], other=0.0).to(tl.float32)
    if R < D:
        c = tl.load(x + rest[None, :], mask=there & in_rest[None, :], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a + b * b, 1)
        if R < D:
            squares += tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / D + eps)
        has_norm = (is_query | is_key)[:, None]
        quotient, weight = normed(a, factor, q_norm_ptr, k_norm_ptr, dim, in_half, is_query, is_key)
        a = tl.where(has_norm, rounded_product(quotient, weight, DTYPE), a)
        quotient, weight = normed(b, factor, q_norm_ptr, k_norm_ptr, HALF + dim, in_half, is_query, is_key)
        b = tl.where(has_norm, rounded_product(quotient, weight, DTYPE), b)
        if R < D:
            quotient, weight = normed(c, factor, q_norm_ptr, k_norm_ptr, rest, in_rest, is_query, is_key)
            c = tl.where(has_norm, rounded_product(quotient, weight, DTYPE), c)
    turns = (is_query | is_key)[:, None]
    first = tl.where(turns, a * cos - b * sin, a).to(DTYPE)
    second = tl.where(turns, b * cos + a * sin, b).to(DTYPE)
    place = (slot // PAGE * page_rows + slot % PAGE) * (2 * HK * D)
    written = slot + tl.zeros([BLOCK_H], tl.int64) >= 0
    scale = tl.full([BLOCK_H], 1.0, tl.float32)
    if HAS_SCALES:
        scale = tl.load(scales_ptr + head - HQ, mask=(head >= HQ) & (head < HQ + 2 * HK), other=1.0)
    store_heads(out_ptr, cache_ptr, first, token, head, place, written, scale, dim, in_half, HQ, HK, D, HAS_SCALES)
    store_heads(out_ptr, cache_ptr, second, token, head, place, written, scale, HALF + dim, in_half, HQ, HK, D, HAS_SCALES)
    if R < D:
        store_heads(out_ptr, cache_ptr, c.to(DTYPE), token, head, place, written, scale, rest, in_rest, HQ, HK, D, HAS_SCALES)


def qkv_rope_write(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    index: Any,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The fusion of that name (`modelrunner.plugins.fusions`) in one launch; index is not needed.

    qkv: [T, (HQ + 2 HK) * D], its last dimension contiguous. cos_sin: [T, R] float32. cache: [num_pages, tokens_per_page, 2, HK, D].
    slots: [T] int64, -1: not written. scales: as of the fusion. Writes the cache. Returns the rotated queries [T, HQ, D].
    """
    num_tokens, dim, rotary = qkv.shape[0], cache.shape[4], cos_sin.shape[1]
    heads = num_heads + 2 * num_kv_heads
    if qkv.stride(1) != 1 or cos_sin.stride(1) != 1:
        qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
    out = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    block = min(next_power_of_2(heads), 4 if num_tokens <= 16 else 16)
    norm = qkv if q_norm is None or k_norm is None else q_norm
    other_norm = qkv if q_norm is None or k_norm is None else k_norm
    norm_rotate_write[(num_tokens, triton.cdiv(heads, block))](
        qkv,
        out,
        cache,
        norm,
        other_norm,
        cos_sin,
        slots,
        cos_sin if scales is None else scales,
        eps,
        qkv.stride(0),
        cos_sin.stride(0),
        rows_per_page(cache),
        HQ=num_heads,
        HK=num_kv_heads,
        D=dim,
        R=rotary,
        PAGE=cache.shape[1],
        BLOCK_H=block,
        BLOCK_HALF=next_power_of_2(rotary // 2),
        BLOCK_REST=next_power_of_2(max(dim - rotary, 1)),
        HAS_NORM=q_norm is not None,
        HAS_SCALES=scales is not None,
        num_warps=1 if block <= 4 else 4,
        **launch_options(qkv.device),
    )
    return out
