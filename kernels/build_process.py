"""The processes that `build_helpers.py` starts: one that gets all ready, and forks as many as are wanted.

`python -m modelrunner.kernels.build_process READ WRITE ...` is the first one; each two numbers are pipes, of jobs and of answers.

They leave torch out: importing it takes several times as long as all else, and kernels are compiled without it. A stand-in takes the place
of what modules with kernels name when they are imported; where that does not do, the answer is an error, and the build is done elsewhere.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelrunner.kernels.build_helpers import Job

FIRST, IDLE = 600.0, 20.0  # seconds without a first job, and without another one, after which a process ends
KERNELS = "modelrunner.kernels"
PR_SET_PDEATHSIG = 1


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class Absent(metaclass=_Names):
    """Whatever is taken out of torch: a type, a decorator, a function that returns one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, function: Any = None, *_: Any, **__: Any) -> Any:
        return function


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Absent, name)


class LeftOut:
    """Finds a module of any name in the package `torch`, empty."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, LeftOut, is_package=True) if name.partition(".")[0] == "torch" else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def same_keys() -> None:
    """Let a kernel's key not depend on which kernels' keys were asked for before.

    Up to Triton 3.6 it does where functions call others with constants of their module: what they use is part of the key only if their own
    key is known already. Processes that meet kernels in different order would then not find each other's builds.
    """
    from triton.runtime.jit import DependenciesFinder

    plain = getattr(DependenciesFinder, "_update_hash", None)
    if plain is None or getattr(plain, "known_first", False):
        return

    def update(finder: Any, function: Any) -> None:
        _ = function.cache_key
        plain(finder, function)

    update.known_first = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update


def launcher(kernel: Any) -> None:
    """Put the module that launches `kernel` into the cache, for versions of Triton that have a C compiler make one."""
    driver = import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher") and kernel.metadata.target.backend == "cuda":
        driver.CudaLauncher(kernel.src, kernel.metadata)


def answer(packed: bytes) -> str | None:
    """Build a pickled job; what went wrong, if anything did."""
    try:
        job: Job = pickle.loads(packed)
        kernel = job.build()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with suppress(Exception):
        launcher(kernel)
    return None


def serve(jobs: int, answers: int) -> None:
    """A process: jobs from a pipe, pickled twice lest one that cannot be read here end it; answers to another one, until nothing comes."""
    patience = FIRST
    with os.fdopen(jobs, "rb") as source, os.fdopen(answers, "wb") as target:
        while select.select([source], [], [], patience)[0]:
            try:
                packed: bytes = pickle.load(source)
            except EOFError:
                return
            pickle.dump(answer(packed), target)
            target.flush()
            patience = IDLE


def get_ready() -> None:
    """Import and find out what every build needs."""
    sys.meta_path.insert(0, LeftOut)
    from triton.runtime import cache

    same_keys()
    key = getattr(cache, "triton_key", None)
    if key is not None:
        key()
    areas = sorted(path.parent.name for path in Path(__file__).parent.glob("*/gpu.py"))
    for module in (f"{KERNELS}.build_helpers", *(f"{KERNELS}.{area}.gpu" for area in areas)):
        with suppress(Exception):
            import_module(module)


def _end_with_parent() -> None:
    """On Linux; elsewhere processes end with their pipes."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(pipes: Sequence[int]) -> None:
    """Get ready, fork a process for each two pipes, and wait for all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they end when the pipes do
    get_ready()
    pairs = list(zip(pipes[::2], pipes[1::2], strict=True))
    for pair in pairs:
        if os.fork() == 0:
            _end_with_parent()
            for other in pipes:
                if other not in pair:
                    os.close(other)
            with suppress(BrokenPipeError):
                serve(*pair)
            os._exit(0)
    for pipe in pipes:
        os.close(pipe)
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
