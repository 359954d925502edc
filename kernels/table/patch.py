"""One launch that applies a step's edits to the request table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256

# Sizes and places of a patch change with every step; a kernel that were built for some of them would be built again while requests wait.
_ANY_SIZE = ["num_runs", "num_words", "halvings"]
_ANY_PLACE = ["dst_ptr", "start_ptr", "words_ptr"]


@triton.jit(do_not_specialize=_ANY_SIZE, do_not_specialize_on_alignment=_ANY_PLACE)
def patch_kernel(arena_ptr, dst_ptr, start_ptr, words_ptr, num_runs, num_words, halvings, BLOCK: tl.constexpr):
    """A program moves BLOCK words. Each finds its run, the last one that starts no later than it, by halving the range of runs."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = word < num_words
    value = tl.load(words_ptr + word, mask=mask)
    run = tl.zeros_like(word)
    end = run + num_runs
    for _ in range(halvings):
        middle = (run + end) // 2
        later = tl.load(start_ptr + middle, mask=mask, other=0) > word
        run = tl.where(later, run, middle)
        end = tl.where(later, middle, end)
    place = tl.load(dst_ptr + run, mask=mask, other=0) + word - tl.load(start_ptr + run, mask=mask, other=0)
    tl.store(arena_ptr + place, value, mask=mask)


def apply_patch(arena: torch.Tensor, dst: torch.Tensor, length: torch.Tensor, start: torch.Tensor, words: torch.Tensor) -> None:
    """See the reference. A run's length follows from the next one's start."""
    runs, n = dst.shape[0], words.shape[0]
    if n:
        patch_kernel[(triton.cdiv(n, BLOCK),)](arena, dst, start, words, runs, n, (runs - 1).bit_length(), BLOCK)
