"""Building Triton kernels ahead of their first launch, many at a time.

Compiling is what most of a first start waits for: some hundred kernels, each by passes and programs that leave Python alone. So the steps
that will run are gone through once without running any kernel; what they would launch is built meanwhile, by other processes where that is
much (`build_helpers.py`), and loaded onto the GPU by threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from heapq import heappop, heappush
from threading import Condition, Lock, Thread
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime.jit import JITFunction

from modelrunner.kernels.build_helpers import HELPERS, MOST, begun, done
from modelrunner.kernels.build_process import same_keys

_seen: ContextVar[set[Any] | None] = ContextVar("kernels_seen", default=None)
_patching = Lock()


@contextmanager
def built_ahead(device: torch.device) -> Iterator[None]:
    """Kernels that this thread launches within are built for `device` and not run; they are ready at the end. Other threads' are run.

    One that cannot be built is passed over: its first launch says why.
    """
    begun()
    same_keys()
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
    done()


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


class _Builders(Executor):
    """Threads that build kernels and load them: of those that wait, the one of the most code first, as it is likely to take longest."""

    def __init__(self, device: torch.device) -> None:
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._more, self._given, self._closed = Condition(), 0, False
        number = min(MOST, len(os.sched_getaffinity(0)))
        self._threads = [Thread(target=self._work, args=(device,), name="build-kernels", daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._more:
            heappush(self._waiting, (-_code_of(work), self._given, future, work))
            self._given += 1
            self._more.notify()
        return future

    def _work(self, device: torch.device) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                _, _, future, work = heappop(self._waiting)
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                future.set_result(_loaded(work))
            except BaseException as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._more:
            self._closed = True
            self._more.notify_all()
        for thread in self._threads:
            thread.join()


def _code_of(work: Callable[[], Any]) -> int:
    """Characters of the kernel that Triton's closure compiles, and of what it calls; 0 if that cannot be told."""
    names = getattr(work, "__code__", None)
    cells = dict(zip(names.co_freevars, work.__closure__ or (), strict=True)) if names is not None else {}
    function = getattr(cells["src"].cell_contents, "fn", None) if "src" in cells else None
    return _code(function) if isinstance(function, JITFunction) else 0


@cache
def _code(function: JITFunction[Any], callers: frozenset[JITFunction[Any]] = frozenset()) -> int:
    above = callers | {function}
    named = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
    return len(function.src) + sum(_code(each, above) for each in named if isinstance(each, JITFunction) and each not in above)


def _loaded(work: Callable[[], Any]) -> Any:
    kernel = HELPERS.build(work)
    _ = kernel.run  # makes its launcher and loads it onto the GPU
    return kernel


def _kind_of_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Equal for launches that run the same build. It may tell more apart than Triton does, but not fewer in what our kernels take."""
    constant, plain = _arguments(kernel)
    kind = [kernel]
    for known, value in zip(constant, args, strict=False):
        kind.append(value if known else _kind(value))
    for name, value in options.items():
        kind += name, _kind(value) if name in plain else value
    return tuple(kind)


@cache
def _arguments(kernel: Any) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Which arguments are constants, by place, and the names of those that are none."""
    constant = tuple(place in kernel.constexprs for place in range(len(kernel.arg_names)))
    return constant, frozenset(name for name, known in zip(kernel.arg_names, constant, strict=True) if not known)


def _kind(value: Any) -> Any:
    """What a build depends on of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, value.bit_length() > 31
    if hasattr(value, "block_shape"):  # a descriptor, which alone may say how large the tiles are
        return type(value), value.base.dtype, tuple(value.block_shape), repr(getattr(value, "layout", None))
    return type(value)
