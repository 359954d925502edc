"""Resident memory of this process: now, and at its highest while something ran. Torch-free."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): sets the peak resident size back to the present one


def process_peak() -> int:
    """Highest resident size since the process began, or since the peak was last set back; bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


class MemoryMeter:
    """Tells apart what several parts of one process hold: each part's use is what resident memory grew by while that part was at work.

    held, peak: part -> bytes. A part that was never measured, or a system without /proc, has no entry.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.process_peak = process_peak()

    @contextmanager
    def at_work(self, part: str) -> Iterator[None]:
        """What happens inside belongs to `part`."""
        before = self._begin()
        try:
            yield
        finally:
            self.process_peak = max(self.process_peak, process_peak())
            if before is not None:
                held = self.held.get(part, 0)
                self.peak[part] = max(self.peak.get(part, 0), held + status_bytes("VmHWM") - before)
                self.held[part] = held + status_bytes("VmRSS") - before

    def _begin(self) -> int | None:
        """Set the peak back; returns the present size, None where that cannot be done."""
        self.process_peak = max(self.process_peak, process_peak())
        if not os.access(CLEAR, os.W_OK):
            return None
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return None
        return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """An entry of /proc/self/status that is given in kB, in bytes."""
    with STATUS.open(encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
