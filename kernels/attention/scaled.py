"""Keys and values that the cache keeps scaled, so that the range of a small type serves them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FLOAT8_SINCE = 89  # compute capability, 10 * major + minor, from which on there are instructions that convert float8_e4m3fn
LARGEST_E4M3 = tl.constexpr(448.0)
HALF_QUERY = tl.constexpr(0.0625)  # of a bfloat16 query in float16: up to 2 ** 20 fit, and what is lost is below 2 ** -21


@triton.jit
def stored(x, scale, TYPE: tl.constexpr, HAS_SCALES: tl.constexpr):
    """x as the cache keeps it, in TYPE: with HAS_SCALES divided by scale, float32; of a type of 8 bits no further than that reaches."""
    if HAS_SCALES:
        x = x.to(tl.float32) * tl.math.div_rn(1.0, scale)
    if TYPE.primitive_bitwidth == 8:
        x = tl.clamp(x.to(tl.float32), -LARGEST_E4M3, LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return x.to(TYPE)


def in_half(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Whether products of these queries are in float16: one instruction makes two numbers of float8_e4m3fn float16, exactly, but it takes
    two more, of the slowest unit, to make them bfloat16."""
    return q.dtype == torch.bfloat16 and cache.dtype == torch.float8_e4m3fn


@triton.jit
def factors(q, IN_HALF: tl.constexpr):
    """Queries as factors of products: in float16, and smaller by HALF_QUERY, with IN_HALF.

    They are made smaller as bfloat16, a power of two being exact: of a product in float32 the compiler would make one in float16, for which
    they are too large.
    """
    if IN_HALF:
        q = (q * HALF_QUERY).to(tl.float32).to(tl.float16)
    return q


@triton.jit
def head_scales(scales_ptr, head, scale, NUM_KV: tl.constexpr, HAS_SCALES: tl.constexpr):
    """scale times that of a head's keys, that of its keys and that of its values."""
    k_scale = 1.0
    v_scale = 1.0
    if HAS_SCALES:
        k_scale = tl.load(scales_ptr + head)
        v_scale = tl.load(scales_ptr + NUM_KV + head)
    return scale * k_scale, k_scale, v_scale


@triton.jit
def values(v, TYPE: tl.constexpr, IN_HALF: tl.constexpr):
    """Values [S, D] as the second factor of a product.

    That wants neighbours along S, which are far apart. Of 16 bits there are instructions that transpose while they load from shared memory,
    of 8 bits there are none, and a compiler that sees through the conversion loads each number by itself.
    """
    if IN_HALF:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r", [v], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return v.to(TYPE)
