"""What a step reports beside its records, on its way from the device to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.batch import Batch
from modelrunner.device import Device, Event
from modelrunner.tap_set import ActiveTaps


class RecordRing:
    """A device ring of byte records beside the ring of step records, and a pinned buffer per entry.

    packed: [lines, record bytes] uint8, the step's records, to be filled before `send`.
    """

    def __init__(self, device: Device, entries: int, lines: int, record_bytes: int) -> None:
        self.device = device
        self.packed = torch.zeros(lines, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.ring = torch.zeros(entries, lines, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.results = [device.pinned(lines * record_bytes) for _ in range(entries)] if record_bytes else []

    def send(self, num_lines: int, counter: torch.Tensor) -> None:
        """D. Put the first `num_lines` records into the ring entry that `counter` names."""
        self.ring[:, :num_lines].index_copy_(0, counter % self.ring.shape[0], self.packed[:num_lines].unsqueeze(0))

    def download(self, entry: int, num_lines: int) -> Event:
        return self.device.download(lambda: self.ring[entry, :num_lines], self.results[entry])

    def take(self, entry: int, num_lines: int) -> npt.NDArray[np.uint8]:
        """A copy of what was downloaded: [num_lines, record bytes]. Frees the buffer."""
        size = self.ring.shape[2]
        records = self.results[entry].array[: num_lines * size].reshape(num_lines, size).copy()
        self.device.release(self.results[entry])
        return records


class Extras(RecordRing):
    """What taps report: a record per row."""

    def write(self, active: ActiveTaps, batch: Batch, counter: torch.Tensor) -> None:
        """D. Put the step's results into the ring entry that `counter` names."""
        active.write(batch, self.packed[: batch.num_rows])
        self.send(batch.num_rows, counter)
