"""An NVIDIA GPU through torch: work is enqueued on a compute stream, results leave on a side stream."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from modelrunner.device import Device, Event, PinnedBuffer, SideEvent
from modelrunner.devices.cpu import copy_bytes
from modelrunner.devices.cuda_graph import captured
from modelrunner.devices.cuda_side import SideStream
from modelrunner.kernels.build_helpers import begin

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings

HIGH_PRIORITY = -1  # of the steps' stream, before work of side streams


class CopyEvents:
    """Two points of a copy on the side stream: begun, when the compute stream has what is copied; and its end, which is waited for.

    They belong to the copy's target and are recorded again for the next one, after the host has waited for the last.
    """

    def __init__(self) -> None:
        self.begun, self.end = torch.cuda.Event(), torch.cuda.Event()
        self.wait: Callable[[], None] = self.end.synchronize


class CudaDevice(Device):
    """One CUDA GPU: the current one when the engine starts."""

    type = "cuda"
    name = "cuda"
    captures = True
    measures = True
    paces = True
    deterministic = True

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        gc.collect()  # an engine that was dropped has memory until then
        begin()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # Products of float32 matrices are IEEE: a setting of the process, since torch has none per call.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.compute = torch.cuda.Stream(self.torch_device, priority=HIGH_PRIORITY)
        self.side = torch.cuda.Stream(self.torch_device)
        # What start-up wrote on the default stream must be there before the first step.
        self._started = False
        self._events: dict[PinnedBuffer, CopyEvents] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side_work: SideStream | None = None

    def pinned(self, num_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(num_bytes, pinned=True)

    def launch(self, work: Callable[[], None]) -> None:
        if not self._started:
            self.compute.wait_stream(torch.cuda.default_stream(self.torch_device))
            self._started = True
        with torch.cuda.stream(self.compute):
            work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return captured(work, self._pool)

    def build(self, work: Sequence[Callable[[], None]]) -> Sequence[bool] | None:
        try:
            from modelrunner.kernels.ahead import built_ahead
        except ImportError:  # without Triton there is nothing to build
            return None
        went = [False] * len(work)
        with built_ahead(self.torch_device):
            for place, part in enumerate(work):
                with contextlib.suppress(Exception):
                    self.launch(part)
                    went[place] = True
        return went

    def forget_graphs(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # torch ends a pool with its last graph

    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        events = self._events.get(target) or self._events.setdefault(target, CopyEvents())
        events.begun.record(self.compute)
        self.side.wait_event(events.begun)
        with torch.cuda.stream(self.side):
            copy_bytes(source(), target)
        events.end.record(self.side)
        return events

    def launch_side(self, work: Callable[[], None], narrow: bool = False) -> SideEvent:
        return self._side_stream().start(work, narrow)

    def _side_stream(self) -> SideStream:
        if self._side_work is None:
            self._side_work = SideStream(self.torch_device, self.settings.media.encoder_share)
        return self._side_work

    def pace_side(self, share: float) -> None:
        self._side_stream().pace.set(share)

    def pacing(self) -> str:
        side = self._side_stream()
        if not side.part:
            return f"{super().pacing()} ({side.no_part})"
        every = torch.cuda.get_device_properties(self.torch_device).multi_processor_count
        return f"on {side.part} multiprocessors of {every} while others decode"

    def give_way(self) -> None:
        if self._side_work is not None:
            self._side_work.give_way()

    def side_place(self) -> int:
        return self._side_stream().place

    def capture_side(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._side_stream().capture(work)

    def upload(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._side_stream().upload(tensor, out)

    def synchronize(self) -> None:
        if self._side_work is not None:
            self._side_work.join()
        torch.cuda.synchronize(self.torch_device)

    def peak(self, work: Callable[[], None]) -> int:
        self.synchronize()
        self.trim()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        self.synchronize()
        most = torch.cuda.max_memory_reserved(self.torch_device)
        self.trim()
        return int(most - before)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free), int(total)
