"""What a runner is made of: its parts, the route of repeated steps, and the way of what taps report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.attention import AttentionBackend
from modelrunner.batch import Batch, Plan
from modelrunner.device import Device, Event
from modelrunner.model_state import ModelState, Needs
from modelrunner.ops import Ops
from modelrunner.page_pool import GroupLayout
from modelrunner.request_table import RequestTable
from modelrunner.sampler import Sampler
from modelrunner.step_buffers import Shape
from modelrunner.tap_set import ActiveTaps, TapSet


@dataclass(frozen=True)
class Parts:
    """What a runner is put together from, each chosen or built at start-up."""

    device: Device
    ops: Ops
    state: ModelState
    needs: Needs
    dtype: torch.dtype
    sampler: Sampler
    table: RequestTable
    layouts: Sequence[GroupLayout]
    caches: Mapping[str, torch.Tensor]
    backends: Mapping[str, AttentionBackend]
    taps: TapSet


@dataclass(frozen=True)
class Route:
    """How steps run that have the rows of `plan`: padded to `shape`, as the graphs of `replay`, or eagerly if that is None.

    The last launched step's rows are still on the device, so a step of the same route sends its patch only.
    """

    plan: Plan
    shape: Shape
    replay: Callable[[], None] | None

    def serves(self, plan: Plan) -> bool:
        """Whether `plan` has the very arrays of this route; they are not written any more (see `steady`)."""
        own = self.plan
        return (
            plan.rows is own.rows
            and plan.generations is own.generations
            and plan.num_query is own.num_query
            and plan.features is own.features
        )


class Extras:
    """The way of what taps report: a device ring of byte records beside the ring of step records, and a pinned buffer per entry."""

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
