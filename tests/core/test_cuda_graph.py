"""Recording of graphs, with torch's part replaced: what Python does meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from modelrunner.devices.cuda_graph import captured


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, ends: list[int]) -> None:
        self.me, self.ends = self, ends

    def __del__(self) -> None:
        self.ends.append(threading.get_ident())


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def litter() -> None:
    """More objects than Python waits for before it looks for garbage."""
    kept = [[place] for place in range(5 * gc.get_threshold()[0])]
    assert kept


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    ends: list[int] = []
    Cycle(ends)

    def work() -> None:
        litter()
        assert not ends

    captured(work, "pool")
    gc.collect()
    assert ends


def test_an_error_while_recording_turns_collection_on_again() -> None:
    def work() -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        captured(work, "pool")


def test_the_last_of_two_threads_turns_collection_on_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def long() -> None:
        inside.set()
        assert leave.wait(10)

    thread = threading.Thread(target=captured, args=(long, "pool"))
    thread.start()
    assert inside.wait(10)
    captured(lambda: None, "pool")
    assert not gc.isenabled()
    leave.set()
    thread.join(10)


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        captured(lambda: None, "pool")
        assert not gc.isenabled()
    finally:
        gc.enable()
