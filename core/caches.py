"""The cache memory on the device: one byte arena of equal pages, seen by each cache group in its own shape."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

from modelrunner.host_memory import map_memory
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


class Arena:
    """The cache's memory on a device. tensor: [num_pages, page_bytes] uint8, zeros.

    On the host it is the system's own: what nothing was written to takes none.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        num_bytes = whole(num_pages * page_bytes)
        self._mapped = map_memory(num_bytes) if device.type == "cpu" else None
        if self._mapped is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.tensor = memory[: num_pages * page_bytes].view(num_pages, page_bytes)

    def free(self) -> None:
        """Give the memory up. Every view of it stays, without contents, and must not be used before `restore`."""
        if self._mapped is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Take freed memory again, all zeros; its views work as before. The address may be another."""
        if self._mapped is None:
            self.tensor.untyped_storage().resize_(whole(self.tensor.numel()))
        if self._mapped is None or sys.platform != "linux":  # which gives zeros for what it was told not to keep
            self.tensor.zero_()


def allocate_caches(
    layouts: Sequence[GroupLayout],
    num_pages: int,
    page_bytes: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[Arena, dict[str, torch.Tensor]]:
    """Allocate the arena, and view it per group. Raises RuntimeError or OSError where there is no room.

    A group's view is [num_pages, num_layers, *page_shape] of `stored_type`; views of different groups share the bytes of a page, and the
    pool gives each page to one group, with those that ride on it, at a time. Page 0 is the null page: it stays zero.
    """
    arena = Arena(num_pages, page_bytes, device)
    views = {}
    for layout in layouts:
        for group, first in ((layout.group, 0), *((rider.group, rider.start) for rider in layout.riders)):
            typed = arena.tensor.view(stored_type(group, cache_dtype, dtype))
            start, tokens = first // typed.element_size(), layout.tokens_per_page
            part = typed[:, start : start + group.page_elements(tokens)]
            views[group.name] = part.unflatten(1, (len(group.layers), *group.page_shape(tokens)))
    return arena, views
