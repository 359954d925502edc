"""A step's keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.device import launch_options, next_power_of_2
from modelrunner.kernels.attention.index import rows_per_page
from modelrunner.kernels.attention.scaled import stored
from modelrunner.kernels.attention.work_list import AttentionWork

BLOCK = 1024  # elements of a token that a program copies


@triton.jit
def write_tokens(
    cache_ptr, k_ptr, v_ptr, slots_ptr, scales_ptr, k_token, k_head, v_token, v_head, page_rows,
    HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head, dim = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None], tl.arange(0, BLOCK_D)[None, :]
        mask = (head < HK) & (dim < D)
        place = (slot // PAGE * page_rows + slot % PAGE) * (2 * HK * D) + head * D + dim
        k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=mask)
        v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask)
        k_scale = 1.0
        v_scale = 1.0
        if HAS_SCALES:
            k_scale = tl.load(scales_ptr + head, mask=head < HK, other=1.0)
            v_scale = tl.load(scales_ptr + HK + head, mask=head < HK, other=1.0)
        tl.store(cache_ptr + place, stored(k, k_scale, cache_ptr.dtype.element_ty, HAS_SCALES), mask=mask)
        tl.store(cache_ptr + place + HK * D, stored(v, v_scale, cache_ptr.dtype.element_ty, HAS_SCALES), mask=mask)


def write_cache(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, *, scales: torch.Tensor | None = None) -> None:
    """`kernels.attention.reference.write_cache` in one launch. k, v: [T, HK, D], any strides but the last."""
    num_tokens, num_kv, dim = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    page_rows = rows_per_page(cache)
    if not num_tokens:
        return
    block_dim = next_power_of_2(dim)
    block = min(next_power_of_2(num_kv), max(1, BLOCK // block_dim))
    write_tokens[(num_tokens, triton.cdiv(num_kv, block))](
        cache,
        k,
        v,
        slots,
        k if scales is None else scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        page_rows,
        HK=num_kv,
        D=dim,
        PAGE=cache.shape[1],
        BLOCK_H=block,
        BLOCK_D=block_dim,
        HAS_SCALES=scales is not None,
        num_warps=2,
        **launch_options(k.device),
    )


def indexed_write(
    cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: AttentionWork, *, scales: torch.Tensor | None = None
) -> None:
    """`write_cache` at the slots that `index` was made for."""
    write_cache(cache, k, v, index.slots, scales=scales)
