"""Processes that build Triton kernels beside this one.

A quarter of a build is Python, which threads do not run side by side. So where builds turn out to be many, some processes take part: they
write what they build into Triton's cache on disk, where this process then finds it. They import no kernel but those that they build, touch
no GPU, and end by themselves when they have had nothing to do for a while, or when this process ends.

`python -m modelrunner.kernels.build_helpers` is such a process.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

MOST = 8  # processes
SLOW = 0.25  # seconds; a kernel from the cache is ready sooner
IDLE = 20.0  # seconds after which a process without work ends
PATIENCE = 120.0  # seconds that an answer may take
HERE = ("", "__main__")  # modules that another process cannot import


@dataclass(frozen=True)
class Job:
    """A kernel to build: where its function is found, what of it changes with its source, and the rest of what Triton compiles from.

    kind: of source: Triton's, or Gluon's.
    """

    kind: type
    module: str
    name: str
    source: str
    signature: Any
    constants: Any
    attrs: Any
    target: Any
    options: Any

    def build(self) -> None:
        """Put it into the cache. Raises whatever goes wrong."""
        import triton

        function = getattr(importlib.import_module(self.module), self.name)
        if function.cache_key != self.source:
            raise RuntimeError(f"{self.module}.{self.name} is not the same here")
        triton.compile(self.kind(function, self.signature, self.constants, self.attrs), target=self.target, options=self.options)


def job_of(build: Callable[[], Any]) -> Job | None:
    """What the function `build` that Triton wants to be called would compile; None where that cannot be told, or not done elsewhere."""
    closure = dict(zip(build.__code__.co_freevars, build.__closure__ or (), strict=True)) if hasattr(build, "__code__") else {}
    try:
        source, target, options = (closure[name].cell_contents for name in ("src", "target", "options"))
        function = source.fn
        if function.__module__ in HERE:
            return None
        parts = (source.signature, source.constants, source.attrs, target, dict(vars(options)))
        job = Job(type(source), function.__module__, function.__name__, function.cache_key, *parts)
        pickle.dumps(job)
    except (KeyError, AttributeError, TypeError, ValueError, pickle.PicklingError):
        return None
    return job


@dataclass
class Helpers:
    """The processes of this one: none until a build was slow."""

    free: SimpleQueue[subprocess.Popen[bytes]] = field(default_factory=SimpleQueue)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def build(self, build: Callable[[], Any]) -> Any:
        """`build()`, after a process without work has done most of it, if there is one."""
        job = job_of(build) if self.started else None
        if job is not None:
            self._let(job)
        begun = time.monotonic()
        kernel = build()
        if time.monotonic() - begun > SLOW:
            self.start(min(MOST, len(os.sched_getaffinity(0)) // 2))
        return kernel

    def start(self, number: int) -> None:
        """Once: so many processes. They take some seconds to be ready; until then they have work waiting, one job each."""
        with self.lock:
            if self.started:
                return
            command = [sys.executable, "-P", "-m", __name__]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            for _ in range(number):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                self.started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
        for process in self.started:
            self.free.put(process)

    def _let(self, job: Job) -> None:
        """Have a process build it, if one is free. One that fails is not asked again: `build()` then does all of it."""
        try:
            process = self.free.get_nowait()
        except Empty:
            return
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], PATIENCE)[0]:
                return
            pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            return
        self.free.put(process)

    def close(self) -> None:
        """End the processes."""
        for process in self.started:
            process.kill()
            process.communicate()
        self.started.clear()
        self.free = SimpleQueue()


HELPERS = Helpers()
atexit.register(HELPERS.close)


def serve() -> None:
    """The process: a job from standard input, then an answer to standard output: None, or what went wrong."""
    import torch  # noqa: F401  # before the first job, as every kernel's module needs it
    import triton  # noqa: F401

    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while select.select([sys.stdin.buffer], [], [], IDLE)[0]:
        try:
            job: Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            job.build()
            answer = None
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
