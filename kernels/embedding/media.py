"""Embeddings of media: a program copies, or adds, a piece of one token's line of the arena; programs of tokens of text end at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.embedding import reference
from modelrunner.kernels.pdl import pdl

MAX_BLOCK = 1024
TOKENS = 128


@triton.jit
def media_kernel(
    out_ptr, arena_ptr, slots_ptr, out_stride, arena_stride, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(arena_ptr + slot * arena_stride + place, mask=place < WIDTH)
        into = out_ptr + token * out_stride + place
        if ADD:
            value = tl.load(into, mask=place < WIDTH).to(tl.float32) + value.to(tl.float32)
        tl.store(into, value.to(out_ptr.dtype.element_ty), mask=place < WIDTH)


@triton.jit(do_not_specialize=["T", "given_stride", "out_stride"])
def positions_kernel(
    given_ptr,
    positions_ptr,
    token_row_ptr,
    rows_ptr,
    delta_ptr,
    out_ptr,
    T,
    given_stride,
    out_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(1).to(tl.int64)
    mask = token < T
    own = tl.load(given_ptr + line * given_stride + token, mask=mask, other=0)
    place = tl.load(token_row_ptr + token, mask=mask, other=0)
    row = tl.load(rows_ptr + place, mask=mask, other=0).to(tl.int64)
    shifted = tl.load(positions_ptr + token, mask=mask, other=0) + tl.load(delta_ptr + row, mask=mask, other=0).to(tl.int64)
    tl.store(out_ptr + line * out_stride + token, tl.where(own >= 0, own.to(tl.int64), tl.maximum(shifted, 0)), mask=mask)


def place_media(out: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor) -> None:
    """See the reference."""
    if out.stride(1) != 1 or arena.stride(1) != 1:
        return reference.place_media(out, arena, slots)
    _launch(out, arena, slots, False)


def add_media(out: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor, start: int) -> None:
    """See the reference."""
    if out.stride(1) != 1 or arena.stride(1) != 1:
        return reference.add_media(out, arena, slots, start)
    _launch(out, arena[:, start:], slots, True)


def _launch(out: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor, add: bool) -> None:
    tokens, width = out.shape
    if not tokens:
        return
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    grid = tokens, triton.cdiv(width, block)
    media_kernel[grid](out, arena, slots, out.stride(0), arena.stride(0), add, width, block, **pdl(out))


def media_positions(
    given: torch.Tensor, positions: torch.Tensor, token_row: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor, out: torch.Tensor
) -> None:
    """See the reference."""
    lines, tokens = out.shape
    if not tokens:
        return
    strides = given.stride(0), out.stride(0)
    positions_kernel[triton.cdiv(tokens, TOKENS), lines](
        given, positions, token_row, rows, delta, out, tokens, *strides, TOKENS, **pdl(out)
    )
