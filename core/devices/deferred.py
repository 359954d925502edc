"""The deferred CPU: three streams whose work runs later, in order, at seeded random moments.

It is a CPU that behaves as badly as a GPU may: launched work has not happened yet, side-stream copies lag behind, and host memory that was
given back is overwritten. A host write to a buffer in use, or a read of a result not yet there, becomes a wrong number
instead of a rare accident.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from modelrunner.device import Event, PinnedBuffer, SideEvent
from modelrunner.devices.cpu import CpuDevice, copy_bytes
from modelrunner.devices.settings import DeferredCpuSettings

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings

POISON_BYTE = 0xA5


@dataclass
class _Copy:
    """A side-stream copy that may run once `after` pieces of compute work have run."""

    after: int
    source: Callable[[], torch.Tensor]
    target: PinnedBuffer
    done: bool = field(default=False)


class _SideEvent:
    """Work on the side stream; `error` is what it raised."""

    def __init__(self, device: DeferredCpuDevice, work: Callable[[], None]) -> None:
        self._device, self.work = device, work
        self.ran = False
        self.error: BaseException | None = None

    def run(self) -> None:
        self.ran = True
        try:
            self.work()
        except Exception as error:
            self.error = error

    def done(self) -> bool:
        self._device.advance()
        if self.error is not None:
            raise self.error
        return self.ran

    def wait(self, seconds: float | None = None) -> None:
        while not self.ran:
            self._device.run_side()
        self.done()


class _CopyEvent:
    def __init__(self, device: DeferredCpuDevice, copy: _Copy) -> None:
        self._device = device
        self._copy = copy

    def wait(self) -> None:
        self._device.advance()
        self._device.run_until(self._copy)


class DeferredCpuDevice(CpuDevice):
    """Runs compute and side-stream work at random later moments, each stream in its own order."""

    name = "deferred_cpu"
    paces = True

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        section = settings.section(DeferredCpuSettings)
        self.random = random.Random(section.seed)
        self.run_probability = section.run_probability
        self.poison = section.poison
        self.captures = section.captures
        self._work: deque[Callable[[], None]] = deque()
        self._copies: deque[_Copy] = deque()
        self._side: deque[_SideEvent] = deque()
        self._in_side = False
        self.share = 1.0
        self._launched = 0
        self._ran = 0
        self._error: BaseException | None = None

    def launch(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._launched += 1
        self.advance()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph here is the closure, run again: what it would read from anywhere but the staged inputs would be stale."""
        return work

    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        copy = _Copy(self._launched, source, target)
        self._copies.append(copy)
        self.advance()
        return _CopyEvent(self, copy)

    def launch_side(self, work: Callable[[], None], narrow: bool = False) -> SideEvent:
        event = _SideEvent(self, work)
        self._side.append(event)
        self.advance()
        return event

    def pace_side(self, share: float) -> None:
        self.share = share

    def give_way(self) -> None:
        """Let a random amount of the steps' work happen between pieces of side work. With pauses it is a piece of it at least."""
        if not self._in_side:
            return
        if self.share < 1 and self._work:
            self._run_work()
        self._advance_steps()

    def capture_side(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def upload(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return tensor.clone() if out is None else out.copy_(tensor)

    def release(self, buffer: PinnedBuffer) -> None:
        if self.poison:
            buffer.tensor.fill_(POISON_BYTE)

    def advance(self) -> None:
        """Let a random amount of work happen."""
        if self._side and self.random.random() < self.run_probability:
            self.run_side()
        self._advance_steps()

    def _advance_steps(self) -> None:
        while self.random.random() < self.run_probability:
            may_copy = bool(self._copies) and self._copies[0].after <= self._ran
            if may_copy and self.random.random() < 0.5:
                self._run_copy()
            elif self._work:
                self._run_work()
            elif not may_copy:
                return

    def run_until(self, copy: _Copy) -> None:
        """Run what `copy` waits for, and `copy`. Raises what work raised, as a GPU reports its errors: late, at a wait."""
        while not copy.done:
            if self._copies[0].after <= self._ran:
                self._run_copy()
            else:
                self._run_work()
        if self._error is not None:
            raise self._error

    def run_side(self) -> None:
        """Run the oldest side work."""
        self._in_side = True
        self._side.popleft().run()
        self._in_side = False

    def synchronize(self) -> None:
        while self._side:
            self.run_side()
        while self._work:
            self._run_work()
        while self._copies:
            self._run_copy()

    def _run_work(self) -> None:
        work = self._work.popleft()
        self._ran += 1
        if self._error is not None:
            return
        try:
            work()
        except Exception as error:
            self._error = error

    def _run_copy(self) -> None:
        copy = self._copies.popleft()
        if self._error is None:
            copy_bytes(copy.source(), copy.target)
        copy.done = True
