"""The CPU: work runs when it is launched, copies are done when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from modelrunner.device import Device, Event, PinnedBuffer

CACHE_SHARE = 0.25  # of the free memory: a host has other work to do
CACHE_MOST = 2 << 30  # bytes that the cache grows to unasked


class Done:
    """The event of work that has happened."""

    def wait(self) -> None:
        return None


class CpuDevice(Device):
    """Plain synchronous execution on the host."""

    type = "cpu"
    name = "cpu"

    def pinned(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(num_bytes, pinned=False)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        copy_bytes(source(), target)
        return Done()

    def synchronize(self) -> None:
        return None

    def memory(self) -> tuple[int, int]:
        """What the host has free, and all that it has, in bytes."""
        page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):  # not Linux
            free = os.sysconf("SC_AVPHYS_PAGES") * page
        return free, total * page

    def cache_budget(self, memory_fraction: float) -> int:
        """A quarter of what is free, at most 2 GiB, whatever the fraction."""
        return min(int(self.memory()[0] * CACHE_SHARE), CACHE_MOST)


def copy_bytes(source: torch.Tensor, target: PinnedBuffer) -> None:
    """Copy a contiguous tensor's bytes to the start of `target`."""
    raw = source.reshape(-1).view(torch.uint8)
    target.tensor[: raw.numel()].copy_(raw, non_blocking=True)
