"""Work beside the steps on a GPU: a stream, and a thread that enqueues its work.

The thread is there because such work (an encoder) takes the host as long to enqueue as some steps last, and because it may wait for its own
copies: the engine's loop does neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

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


class SideStream:
    """Runs work in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # of the lowest priority
        self._stream.wait_stream(torch.cuda.default_stream(device))  # what start-up wrote must be there
        self._thread = ThreadPoolExecutor(1, "modelrunner-side", torch.cuda.set_device, (device,))
        self._pieces: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0

    def start(self, work: Callable[[], None]) -> SideWork:
        event = torch.cuda.Event()
        return SideWork(self._thread.submit(self._run, work, event), event)

    def _run(self, work: Callable[[], None], event: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            try:
                work()
            finally:
                event.record(self._stream)

    def join(self) -> None:
        """Wait until all work is enqueued."""
        self._thread.submit(int).result()

    @torch.inference_mode()
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the thread: the tensor's contents on the device. A piece waits until the copy out of its memory before it is done."""
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
