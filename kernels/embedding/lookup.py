"""Embedding lookup: a program copies a piece of one token's line."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.embedding import reference
from modelrunner.kernels.pdl import pdl

MAX_BLOCK = 1024


@triton.jit
def embedding_kernel(ids_ptr, weight_ptr, out_ptr, weight_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    line = tl.load(ids_ptr + token)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight_ptr + line * weight_stride + place, mask=place < WIDTH)
    tl.store(out_ptr + token * out_stride + place, value.to(out_ptr.dtype.element_ty), mask=place < WIDTH)


def embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See the reference."""
    if weight.stride(1) != 1 or out.stride(1) != 1:
        return reference.embedding(ids, weight, out)
    tokens, width = out.shape
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    embedding_kernel[(tokens, triton.cdiv(width, block))](ids, weight, out, weight.stride(0), out.stride(0), width, block, **pdl(out))
