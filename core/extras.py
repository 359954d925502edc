"""The way of what taps report, from the device to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.batch import Batch
from modelrunner.device import Device, Event
from modelrunner.tap_set import ActiveTaps


class Extras:
    """A device ring of byte records beside the ring of step records, and a pinned buffer per entry."""

    def __init__(self, device: Device, entries: int, rows: int, record_bytes: int) -> None:
        self.device = device
        self.packed = torch.zeros(rows, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.ring = torch.zeros(entries, rows, record_bytes, dtype=torch.uint8, device=device.torch_device)
        self.results = [device.pinned(rows * record_bytes) for _ in range(entries)] if record_bytes else []

    def write(self, active: ActiveTaps, batch: Batch, counter: torch.Tensor) -> None:
        """D. Put the step's results into the ring entry that `counter` names."""
        packed = self.packed[: batch.num_rows]
        active.write(batch, packed)
        self.ring[:, : batch.num_rows].index_copy_(0, counter % self.ring.shape[0], packed.unsqueeze(0))

    def download(self, entry: int, num_rows: int) -> Event:
        return self.device.download(lambda: self.ring[entry, :num_rows], self.results[entry])

    def take(self, entry: int, num_rows: int) -> npt.NDArray[np.uint8]:
        """A copy of what was downloaded: [num_rows, record bytes]. Frees the buffer."""
        size = self.ring.shape[2]
        records = self.results[entry].array[: num_rows * size].reshape(num_rows, size).copy()
        self.device.release(self.results[entry])
        return records
