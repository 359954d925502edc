"""CUDA graphs: how work is recorded."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Uncollected:
    """While any thread is in it, Python looks for no garbage: a dropped engine's graphs, events and memory would be given back wherever
    that happens to start, and a thread that records may do nothing of the kind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._was_on:
                    gc.enable()


uncollected = Uncollected()


def captured(work: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A graph of `work`, recorded on the current stream, which is not the default one, with memory of the pool. Returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with uncollected():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what broke the capture is the error to show
                graph.capture_end()
            raise
        graph.capture_end()
    replay: Callable[[], None] = graph.replay
    return replay
