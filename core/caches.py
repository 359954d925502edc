"""The cache memory on the device: one byte arena of equal pages, seen by each cache group in its own shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelrunner.model_state import CacheGroup, FullAttention
from modelrunner.page_pool import GroupLayout

BLOCK = 2 << 20  # bytes; torch's allocator takes large memory in blocks of so many


def whole(num_bytes: int) -> int:
    """As many bytes or more, in whole blocks: another tensor that got what is left of the last one would keep all of it from being given
    back."""
    return -(-num_bytes // BLOCK) * BLOCK


def stored_type(group: CacheGroup, cache_dtype: torch.dtype, dtype: torch.dtype | None = None) -> torch.dtype:
    """Type of what a group keeps: its own, else the cache's. 8 bits need scales, which attention applies: groups of another kind then get
    `dtype`, the model's (default: the cache's)."""
    own = group.cache_dtype()
    if own is not None:
        return own
    return cache_dtype if dtype is None or cache_dtype.itemsize > 1 or isinstance(group, FullAttention) else dtype


def allocate_caches(
    layouts: Sequence[GroupLayout],
    num_pages: int,
    page_bytes: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate the arena, [num_pages, page_bytes] uint8 zeros, and view it per group.

    A group's view is [num_pages, num_layers, *page_shape] of `stored_type`; views of different groups share the bytes of a page, and the
    pool gives each page to one group, with those that ride on it, at a time. Page 0 is the null page: it stays zero.
    """
    arena = torch.zeros(whole(num_pages * page_bytes), dtype=torch.uint8, device=device)[: num_pages * page_bytes].view(
        num_pages, page_bytes
    )
    views = {}
    for layout in layouts:
        for group, first in ((layout.group, 0), *((rider.group, rider.start) for rider in layout.riders)):
            typed = arena.view(stored_type(group, cache_dtype, dtype))
            start, tokens = first // typed.element_size(), layout.tokens_per_page
            part = typed[:, start : start + group.page_elements(tokens)]
            views[group.name] = part.unflatten(1, (len(group.layers), *group.page_shape(tokens)))
    return arena, views


def free_arena(arena: torch.Tensor) -> None:
    """Give the arena's memory up. Every view of it stays, without contents, and must not be used before `restore_arena`."""
    arena.untyped_storage().resize_(0)


def restore_arena(arena: torch.Tensor) -> None:
    """Give a freed arena memory again, all zeros; its views work as before. The address may be another."""
    arena.untyped_storage().resize_(whole(arena.numel()))
    arena.zero_()
