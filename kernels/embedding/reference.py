"""Embedding lookup in plain torch."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = weight[ids[t]], in place. ids: [T] int64. weight: [V, H]. out: [T, H], of weight's dtype or another."""
    if out.dtype == weight.dtype:
        torch.index_select(weight, 0, ids, out=out)
    else:
        out.copy_(weight.index_select(0, ids))


def place_media(out: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor) -> None:
    """out[t] = arena[slots[t], :H] where slots[t] >= 0, in place; other lines stay. out: [T, H]. arena: [S, W], W >= H, any dtype.
    slots: [T] int32, less than S."""
    H = out.shape[1]
    lines = arena[:, :H].index_select(0, slots.clamp(min=0)).to(out.dtype)
    out.copy_(torch.where(slots.unsqueeze(1) >= 0, lines, out))


def add_media(out: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor, start: int) -> None:
    """out[t] += arena[slots[t], start : start + H] where slots[t] >= 0, in place, the sum in float32 and rounded once. Otherwise as
    `place_media`. start: element of the arena's lines."""
    H = out.shape[1]
    lines = arena[:, start : start + H].index_select(0, slots.clamp(min=0)).float()
    out.copy_(torch.where(slots.unsqueeze(1) >= 0, (out.float() + lines).to(out.dtype), out))


def media_positions(
    given: torch.Tensor, positions: torch.Tensor, token_row: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor, out: torch.Tensor
) -> None:
    """out[r, t] = given[r, t] where that is not negative, else positions[t] + delta[rows[token_row[t]]], at least 0 (which invalid tokens
    could fall short of): positions of M-RoPE, in place.

    given: [R, T] int32. positions: [T] int64, tokens' indices in their requests. token_row: [T] int64, place in [0, N). rows: [N] int32,
    lines of delta. delta: [lines] int32. out: [R, T] int64.
    """
    shifted = positions + delta.index_select(0, rows.index_select(0, token_row).long())
    out.copy_(torch.where(given >= 0, given.long(), shifted.clamp(min=0)))
