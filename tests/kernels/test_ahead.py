"""What is launched ahead is built once for each kind of launch, and not run; other threads' launches are run."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import build
from triton.runtime.jit import JITFunction

from modelrunner.kernels.ahead import built_ahead


def add(x_ptr, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any]]:
    """(warmup, arguments) of what reaches Triton."""
    found: list[tuple[bool, Any]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((warmup, (*args[1:], *options.values())))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def test_each_kind_of_launch_is_built_once(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    with built_ahead(torch.device("cpu")):
        for n in (1, 16, 32, 7, 9, 2**40):  # one, two multiples of 16, two others, a 64-bit one (of 16)
            kernel[(1,)](x, n, 2.0, BLOCK=8)
            kernel[(1,)](x, n, 3.0, BLOCK=8)
        kernel[(1,)](x, 7, 2.0, BLOCK=16)
        kernel[(1,)](x.half(), 7, 2.0, BLOCK=8)
        kernel[(1,)](x[1:], 7, 2.0, BLOCK=8)
        kernel[(1,)](x, 7, 2.0, BLOCK=8, num_warps=8)
    assert launches[:4] == [(True, (n, 2.0, 8)) for n in (1, 16, 7, 2**40)]
    assert len(launches) == 8
    kernel[(1,)](x, 7, 2.0, BLOCK=8)
    assert launches[-1] == (False, (7, 2.0, 8))


def test_another_threads_launch_is_run(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    other = threading.Thread(target=lambda: kernel[(1,)](x, 3, 1.0, BLOCK=8))
    with built_ahead(torch.device("cpu")):
        other.start()
        other.join()
        kernel[(1,)](x, 3, 1.0, BLOCK=8)
    assert [warmup for warmup, _ in launches] == [False, True]


def test_launchers_of_one_name_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does, the one that is loaded again is the last of its name."""
    shared = ModuleType("launcher")

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with built_ahead(torch.device("cpu")):
        first, second = (build._load_module_from_path("launcher", path) for path in ("one", "two"))
    assert (first.launch, second.launch, shared.launch) == ("one", "two", "two")
    assert build._load_module_from_path is load


def test_an_error_leaves_nothing_behind(launches: list[tuple[bool, Any]]) -> None:
    kernel, x = JITFunction(add), torch.zeros(64)
    with pytest.raises(ZeroDivisionError), built_ahead(torch.device("cpu")):
        _ = 1 / 0
    kernel[(1,)](x, 3, 1.0, BLOCK=8)
    assert [warmup for warmup, _ in launches] == [False]
