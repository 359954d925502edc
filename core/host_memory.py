"""Memory of the host straight from the system, not from the heap: zeros, taken as it is written, gone with its last user."""

from __future__ import annotations

import mmap
from math import prod

import torch


def map_memory(num_bytes: int) -> mmap.mmap:
    """So many bytes of it. Raises OSError where there is no room."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def mapped_zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros in it."""
    return torch.frombuffer(map_memory(prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
