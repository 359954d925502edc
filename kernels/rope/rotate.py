"""Rotary position embedding in one launch for queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.attention.device import launch_options, next_power_of_2

BLOCK = 2048  # elements of a token that a program rotates


@triton.jit
def rotate_heads(
    x_ptr, out_ptr, token, token_step, head, head_step, cos, sin, there,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotate heads `head` [B, 1] of a token of x [T, H, D] into out, contiguous. cos, sin: [1, BLOCK_HALF]. there: [B, 1]."""
    dim, rest = tl.arange(0, BLOCK_HALF)[None, :], 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    mask = there & (dim < HALF)
    x = x_ptr + token * token_step + head * head_step
    out = out_ptr + (token * H + head) * D
    a = tl.load(x + dim, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + HALF + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + dim, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF + dim, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)
    if 2 * HALF < D:
        tl.store(out + rest, tl.load(x + rest, mask=there & (rest < D)), mask=there & (rest < D))


@triton.jit
def rotate(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, positions_ptr, cos_sin_ptr, q_token, q_head, k_token, k_head, cos_sin_row,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads): blocks of query heads first, then those of key heads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = R // 2
    Q_BLOCKS: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token
    if HAS_POSITIONS:
        row = tl.load(positions_ptr + token)
    dim = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_sin_ptr + row * cos_sin_row + dim, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + row * cos_sin_row + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    head = tl.arange(0, BLOCK_H)[:, None]
    if block < Q_BLOCKS:
        head += block * BLOCK_H
        rotate_heads(q_ptr, q_out_ptr, token, q_token, head, q_head, cos, sin, head < HQ, HQ, D, HALF, BLOCK_HALF, BLOCK_REST)
    else:
        head += (block - Q_BLOCKS) * BLOCK_H
        rotate_heads(k_ptr, k_out_ptr, token, k_token, head, k_head, cos, sin, head < HK, HK, D, HALF, BLOCK_HALF, BLOCK_REST)


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.rope.reference.apply_rope`. q: [T, H, D]. k: [T, HK, D]. Returns new contiguous tensors."""
    num_tokens, heads, dim = q.shape
    kv_heads, rotary = k.shape[1], cos_sin.shape[1]
    if q.stride(2) != 1 or k.stride(2) != 1 or cos_sin.stride(1) != 1:
        q, k, cos_sin = q.contiguous(), k.contiguous(), cos_sin.contiguous()
    q_out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((num_tokens, kv_heads, dim), dtype=k.dtype, device=k.device)
    if not num_tokens:
        return q_out, k_out
    block = min(next_power_of_2(max(heads, kv_heads)), max(1, BLOCK // next_power_of_2(dim)))
    rotate[(num_tokens, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
        q,
        k,
        q_out,
        k_out,
        cos_sin if positions is None else positions,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin.stride(0),
        HQ=heads,
        HK=kv_heads,
        D=dim,
        R=rotary,
        HAS_POSITIONS=positions is not None,
        BLOCK_H=block,
        BLOCK_HALF=next_power_of_2(rotary // 2),
        BLOCK_REST=next_power_of_2(max(dim - rotary, 1)),
        num_warps=4,
        **launch_options(q.device),
    )
    return q_out, k_out
