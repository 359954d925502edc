"""Devices: where a step runs. Streams, events, pinned memory, behind one small interface.

The runner hands the device closures. On CUDA and on the CPU they run at once (on CUDA that enqueues kernels); the deferred CPU runs
them later, in stream order, at seeded random moments, which makes races show without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the host until the work before the point is done."""


class SideEvent(Protocol):
    """The end of work on a side stream. `wait` and `done` raise what the work raised, each time."""

    def wait(self, seconds: float | None = None) -> None:
        """Block the host until the work is done, or, where the device can tell, for about so many seconds."""

    def done(self) -> bool:
        """Whether the work is done. Never waits."""


class PinnedBuffer:
    """Host memory that the device can read and write: one allocation, seen as a tensor and as a numpy array.

    tensor: [size] uint8. Views of other types share its bytes.
    """

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.array: npt.NDArray[np.uint8] = self.tensor.numpy()


class Device(ABC):
    """The device interface. `type` is torch's device type ("cpu", "cuda"), by which operations are overridden."""

    type: str = "cpu"
    name: str = "cpu"
    captures: bool = False  # whether `capture` works
    measures: bool = False  # whether `peak` works, so that the cache can be sized by it
    paces: bool = False  # whether `pace_side` works
    deterministic: bool = False  # whether there are operations for it whose results for a row do not depend on the other rows
    poison: bool = False  # whether released buffers and ring entries are overwritten, to show who still reads them

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.torch_device = torch.device(self.type)

    @abstractmethod
    def pinned(self, num_bytes: int) -> PinnedBuffer:
        """Allocate host memory for transfers. Start-up only."""

    @abstractmethod
    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue `work` on the compute stream. `work` must not synchronise; whatever it reads must stay unchanged until it ran."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, which has run before or was built (see `build`), without running it. Called inside `launch`, as is the result,
        which runs it again on the contents that the same memory has by then. Whatever `work` allocates comes from a pool that all graphs
        share."""
        raise NotImplementedError(f"device {self.name!r} captures no graphs")

    def build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool] | None:
        """Get ready what all of `work` will launch, running as little of it as possible, so that its first run need not wait. Start-up
        only: what `work` reads and writes here means nothing. An error is left for that first run. Returns of each whether it may be
        captured without a first run; None, as devices of interfaces before 1.8 do: nothing may."""
        return None

    def forget_graphs(self) -> None:
        """All results of `capture` are gone; later ones share a new pool."""
        return None

    @abstractmethod
    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        """Enqueue on the side stream, after all work launched so far: copy `source()` (any dtype, contiguous) to the start of `target`."""

    def launch_side(self, work: Callable[[], None], narrow: bool = False) -> SideEvent:
        """Enqueue `work` on a stream of its own, beside the steps, where such work runs in order. It reads and writes nothing that a step
        touches meanwhile; what it reads must stay unchanged until it is done. It may allocate, and wait for copies of its own; the caller
        never waits. narrow: it may be kept to a part of the device, where `pace_side` asks for that, in memory of its own.

        Steps that are launched after `done()` see what it wrote. Without a side stream it runs in the compute stream, before them.
        """
        return InLine(self, work)

    def pace_side(self, share: float) -> None:
        """From now on, let side work take no more than `share` of the device, more than 0 to 1: narrow work that begins is kept to the part
        of the multiprocessors that `media.encoder_share` says, other work pauses in `give_way`. Called between two launches, and never
        waits."""
        raise NotImplementedError(f"device {self.name!r} does not pace side work")

    def side_place(self) -> int:
        """Where on the device side work runs now, a number. Only inside of it."""
        return 0

    def capture_side(self, work: Callable[[], None]) -> Callable[[], None]:
        """As `capture`, of a piece of side work, and inside of it; the result is called where `side_place` is the same."""
        raise NotImplementedError(f"device {self.name!r} captures no graphs")

    def pacing(self) -> str:
        """How side work is kept to its share, for people to read. Once some has run."""
        return "pauses while others decode"

    def give_way(self) -> None:
        """Called by side work between two pieces of it: the place for a pause. Anywhere else nothing happens."""
        return None

    def upload(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """A CPU tensor's contents on the device, in `out` where that is given, contiguous, of the same shape and dtype. Only inside of work
        of `launch_side`."""
        return tensor.to(self.torch_device) if out is None else out.copy_(tensor)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything, also for what torch did outside of `launch`. Start-up, shutdown, changes between steps, and tests only."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""

    def peak(self, work: Callable[[], None]) -> int:
        """Run `work`, which may launch and wait, and tell how many bytes it took at most beside what was taken before. What it gave back is
        free again. Start-up only."""
        raise NotImplementedError(f"device {self.name!r} does not measure memory")

    def cache_budget(self, memory_fraction: float) -> int:
        """Bytes that the cache may take when weights and cache may fill that share of the memory. Weights are loaded; the rest of the
        memory is left for the request table, the step's buffers and activations."""
        free, total = self.memory()
        return int(free - total * (1 - memory_fraction))

    def trim(self) -> None:
        """Give memory that was freed back to the system. Between steps only."""
        return None

    def release(self, buffer: PinnedBuffer) -> None:
        """The host is done with `buffer` until it writes it again. A testing device poisons it."""
        return None


class InLine:
    """The event of side work that ran in the compute stream: what is launched later comes after it anyway."""

    def __init__(self, device: Device, work: Callable[[], None]) -> None:
        self._device, self._work = device, work
        self._error: BaseException | None = None
        device.launch(self._run)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def wait(self, seconds: float | None = None) -> None:
        self._device.synchronize()
        self.done()
