"""Building Triton kernels ahead of their first launch, many at a time.

Compiling is what most of a first start waits for: some hundred kernels, each by passes and programs that leave Python alone. So the steps
that will run are gone through once without running any kernel; what they would launch is built by threads meanwhile, and by other processes
where that is much (`build_helpers.py`), down to the machine code on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime.jit import JITFunction

from modelrunner.kernels.build_helpers import HELPERS

MAX_THREADS = 16
_seen: ContextVar[set[Any] | None] = ContextVar("kernels_seen", default=None)
_patching = Lock()


@contextmanager
def built_ahead(device: torch.device) -> Iterator[None]:
    """Kernels that this thread launches within are built for `device` and not run; they are ready at the end. Other threads' are run.

    One that cannot be built is passed over: its first launch says why.
    """
    with _patching, _modules_apart(), _Builders(device) as builders, triton.AsyncCompileMode(builders, ignore_errors=True):
        plain, token = JITFunction.run, _seen.set(set())

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            seen = _seen.get()
            if seen is None:
                return plain(kernel, *args, grid=grid, warmup=warmup, **options)
            if (key := _kind_of_launch(kernel, args, options)) in seen:
                return None
            seen.add(key)
            return plain(kernel, *args, grid=grid, warmup=True, **options)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = plain
            _seen.reset(token)


@contextmanager
def _modules_apart() -> Iterator[None]:
    """Threads that load kernels' launchers get each its own.

    Triton gives all these modules one name. Python keeps one module of a name that was loaded twice from its file, and puts the contents
    of whichever came last into it: a thread might take another's function out of it.
    """
    plain, loading = getattr(build, "_load_module_from_path", None), Lock()
    if plain is None:
        yield
        return

    def load(name: str, path: str) -> SimpleNamespace:
        with loading:
            return SimpleNamespace(**vars(plain(name, path)))

    build._load_module_from_path = load
    try:
        yield
    finally:
        build._load_module_from_path = plain


class _Builders(ThreadPoolExecutor):
    """Threads that build kernels and load them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(min(MAX_THREADS, len(os.sched_getaffinity(0))), "build-kernels", torch.cuda.set_device, (device,))

    def submit(self, work: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_loaded, work)


def _loaded(work: Callable[[], Any]) -> Any:
    kernel = HELPERS.build(work)
    _ = kernel.run  # makes its launcher and loads it onto the GPU
    return kernel


def _kind_of_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Equal for launches that run the same build. It may tell more apart than Triton does, but not fewer in what our kernels take."""
    plain = _arguments(kernel)
    by_place = tuple(_kind(value) if name in plain else value for name, value in zip(kernel.arg_names, args, strict=False))
    by_name = tuple((name, _kind(value) if name in plain else value) for name, value in options.items())
    return kernel, by_place, by_name


@cache
def _arguments(kernel: Any) -> frozenset[str]:
    """Names of the arguments that are no constants."""
    return frozenset(kernel.arg_names).difference(kernel.arg_names[place] for place in kernel.constexprs)


def _kind(value: Any) -> Any:
    """What a build depends on of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)
