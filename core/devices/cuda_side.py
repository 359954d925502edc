"""Work beside the steps on a GPU: a stream, and a thread that enqueues its work.

The thread is there because such work (an encoder) takes the host as long to enqueue as some steps last, and because it may wait: for its
own copies, and for its own pieces, where it leaves the device to the steps in between. The engine's loop does neither.

Where the steps are to be spared, work runs on a second stream, on a part of the multiprocessors; it makes pauses where there is no such
stream, where the memory for another stream's work was not counted, and where it was on its way before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from modelrunner.devices.cuda_graph import captured
from modelrunner.devices.cuda_part import NoParts, part_stream

POLL_SECONDS = 0.0005
PIECE = 8 << 20  # bytes that go through pinned memory at a time


class SideWork:
    """The event of some work: its thread is done with it, and then the stream."""

    def __init__(self, enqueued: Future[None], event: torch.cuda.Event) -> None:
        self._enqueued, self._event = enqueued, event

    def done(self) -> bool:
        if not self._enqueued.done():
            return False
        self._enqueued.result()
        return bool(self._event.query())

    def wait(self, seconds: float | None = None) -> None:
        if seconds is None:
            self._enqueued.result()
            self._event.synchronize()
            return
        stop = time.monotonic() + seconds
        while not self.done() and time.monotonic() < stop:
            time.sleep(POLL_SECONDS)


class Pace:
    """Which share of the time work may take. The loop sets it at any time; the thread keeps it. rested: seconds that it waited, in all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._share, self._until = 1.0, 0.0  # until: seconds of the clock
        self._free = threading.Event()
        self._free.set()
        self.rested = 0.0

    @property
    def free(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._free.is_set()

    def set(self, share: float) -> None:
        """1 ends a pause."""
        self._share = share
        if share < 1:
            self._free.clear()
        else:
            self._free.set()

    def owe(self, took: float) -> None:
        """A piece that took so many seconds has ended now."""
        self._until = self._clock() + took * (1 / self._share - 1)

    def rest(self) -> None:
        """Wait for what is owed, or until nothing is to be waited for."""
        begun = self._clock()
        if self._until > begun and not self._free.wait(self._until - begun):
            self.rested += self._clock() - begun


class SideStream:
    """Runs work in order.

    part: multiprocessors of the second stream, 0 where there is none. no_part: why.
    """

    def __init__(self, device: torch.device, share: float = 1.0) -> None:
        """share: of the multiprocessors, for the second stream; there is none for 1."""
        self._device = device
        self.pace, self.part, self.no_part = Pace(), 0, ""
        self._narrow: torch.cuda.Stream | None = None
        if share < 1:
            try:
                self._narrow, self.part = part_stream(device, share)
            except NoParts as error:
                self.no_part = str(error)
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # of a piece
        self._whole = self._stream = torch.cuda.Stream(device)  # of the lowest priority; the second is that of the work that runs
        self._stream.wait_stream(torch.cuda.default_stream(device))  # what start-up wrote must be there
        self._thread = ThreadPoolExecutor(1, "modelrunner-side", torch.cuda.set_device, (device,))
        self._pieces: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0
        self._thread_id = -1
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(2)]  # of each place

    def start(self, work: Callable[[], None], narrow: bool) -> SideWork:
        event = torch.cuda.Event()
        return SideWork(self._thread.submit(self._run, work, event, narrow), event)

    def _run(self, work: Callable[[], None], event: torch.cuda.Event, narrow: bool) -> None:
        stream = self._narrow if narrow and self._narrow is not None and not self.pace.free else self._whole
        if stream is not self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream
        with torch.cuda.stream(stream):
            self._thread_id = threading.get_ident()
            self._begin()
            try:
                work()
            finally:
                event.record(stream)
            self._end()

    def give_way(self) -> None:
        """In the thread, between pieces of work; elsewhere nothing happens."""
        if self._thread_id == threading.get_ident() and self._pauses:
            self._end()
            self._begin()

    @property
    def _pauses(self) -> bool:
        return self._stream is self._whole and not self.pace.free

    def _begin(self) -> None:
        if self._pauses:
            self.pace.rest()
        self._begun.record(self._stream)

    def _end(self) -> None:
        """Where pauses are to be made, wait for the piece: how long the device had it decides about the pause."""
        if self._pauses:
            self._ended.record(self._stream)
            self._ended.synchronize()
            self.pace.owe(self._begun.elapsed_time(self._ended) / 1e3)

    def join(self) -> None:
        """Wait until all work is enqueued."""
        self._thread.submit(int).result()

    @property
    def place(self) -> int:
        """Of the work that runs: 1 is the part."""
        return int(self._stream is not self._whole)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """In the thread: a graph of `work`, which makes no pauses there."""
        thread, self._thread_id = self._thread_id, -1
        try:
            return captured(work, self._pools[self.place])
        finally:
            self._thread_id = thread

    @torch.inference_mode()
    def upload(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """In the thread: see `Device.upload`. A piece waits until the copy out of its memory before it is done."""
        if out is None:
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if not tensor.numel():
            return out
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor.contiguous(), out))
        if not self._pieces:
            self._pieces = [(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
        for start in range(0, source.numel(), PIECE):
            part = source[start : start + PIECE]
            memory, event = self._pieces[self._next]
            self._next = (self._next + 1) % len(self._pieces)
            event.synchronize()
            memory[: part.numel()].copy_(part)
            target[start : start + part.numel()].copy_(memory[: part.numel()], non_blocking=True)
            event.record(self._stream)
        return out
