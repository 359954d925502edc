"""Prompt lookup: where a row's text ended before as it ends now. Two launches: pieces of each text, then the best place of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modelrunner.kernels.pdl import pdl

PIECE = 2048  # places of a program
TILE = 512  # at a time
_ANY_SIZE = ["pieces", "longest"]


@triton.jit(do_not_specialize=_ANY_SIZE)
def match_kernel(
    rows_ptr, wants_ptr, known_ptr, token_ids_ptr, scores_ptr, pieces, longest, L, MIN: tl.constexpr, MAX: tl.constexpr,
    PIECE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the best place of piece j of row i's text, as match length * longest + place; -1 for none."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(known_ptr + i) - 1
    wants = tl.load(wants_ptr + i) != 0
    text = token_ids_ptr + tl.load(rows_ptr + i).to(tl.int64) * L
    stop = tl.minimum(tl.where(wants, end, 0), (piece + 1) * PIECE)
    best = tl.full([TILE], -1, tl.int64)
    for first in range(piece * PIECE, stop, TILE):
        place = first + tl.arange(0, TILE)
        same = place < stop
        length = tl.zeros([TILE], tl.int32)
        for back in tl.static_range(MAX):
            wanted = tl.load(text + end - back, mask=end >= back, other=-1)
            there = same & (place >= back)
            same = there & (tl.load(text + place - back, mask=there, other=-2) == wanted)
            length += same.to(tl.int32)
        score = tl.where(length >= MIN, length.to(tl.int64) * longest + place, -1)
        best = tl.maximum(best, score)
    tl.store(scores_ptr + i * pieces + piece, tl.max(best, 0))


@triton.jit(do_not_specialize=_ANY_SIZE)
def copy_kernel(
    rows_ptr, known_ptr, token_ids_ptr, scores_ptr, out_ptr, pieces, longest, L, out_stride, K,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program copies what followed the best place of row i."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    best = tl.full([PIECES], -1, tl.int64)
    for first in range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        best = tl.maximum(best, tl.load(scores_ptr + i * pieces + piece, mask=piece < pieces, other=-1))
    score = tl.max(best, 0)
    at = (tl.maximum(score, 0) % longest).to(tl.int32)
    end = tl.load(known_ptr + i) - 1
    step = tl.arange(0, WIDTH)
    source = at + 1 + step % tl.maximum(end - at, 1)
    mask = step < tl.where(score >= 0, K, 0)  # a row that wants nothing has found nothing
    ids = tl.load(token_ids_ptr + tl.load(rows_ptr + i).to(tl.int64) * L + source, mask=mask, other=0)
    tl.store(out_ptr + i * out_stride + step, ids, mask=mask)


def ngram_draft(
    rows: torch.Tensor,
    wants: torch.Tensor,
    known: torch.Tensor,
    token_ids: torch.Tensor,
    longest: int,
    min_size: int,
    max_size: int,
    out: torch.Tensor,
) -> None:
    """See the reference."""
    (n, k), pieces = out.shape, triton.cdiv(longest, PIECE)
    if not n or not k:
        return
    scores = torch.empty(n, pieces, dtype=torch.int64, device=rows.device)
    length = token_ids.stride(0)
    match_kernel[(n, pieces)](
        rows, wants, known, token_ids, scores, pieces, longest, length, min_size, max_size, PIECE, TILE, num_warps=4, **pdl(rows)
    )
    copy_kernel[(n,)](
        rows, known, token_ids, scores, out, pieces, longest, length, out.stride(0), k,
        64, triton.next_power_of_2(max(k, 2)), num_warps=1, **pdl(rows),
    )  # fmt: skip
