"""Processes that build Triton kernels beside this one.

A quarter of a build is Python, which threads do not run side by side. So some processes take part, from the start where the cache has
nothing of these kernels, else once a build was slow: they write what they build into Triton's cache on disk, where this process then finds
it. They touch no GPU, and end by themselves when they have had nothing to do for a while, or when this process ends.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, BinaryIO, NamedTuple

MOST = 16  # processes
SLOW = 0.25  # seconds; a kernel from the cache is ready sooner
PATIENCE = 120.0  # seconds that an answer may take
HERE = ("", "__main__")  # modules that another process cannot import
SERVER = "modelrunner.kernels.build_process"


def cache_folder() -> Path:
    """Triton's cache, as far as its environment says."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # which has no error for a user without one
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def record() -> Path:
    """The file in the cache that says that an engine was started with these kernels and this compiler before."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    known: list[Any] = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]
    with suppress(PackageNotFoundError):
        known.append(version("triton"))
    return cache_folder() / f"modelrunner-{hashlib.sha256(repr(known).encode()).hexdigest()}"


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

    def build(self) -> Any:
        """The compiled kernel, which then is in the cache. Raises whatever goes wrong."""
        import triton

        function = getattr(importlib.import_module(self.module), self.name)
        if function.cache_key != self.source:
            raise RuntimeError(f"{self.module}.{self.name} is not the same here")
        return triton.compile(self.kind(function, self.signature, self.constants, self.attrs), target=self.target, options=self.options)


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


def begin() -> None:
    """Start what builds will need, so that it goes on beside the rest of an engine's start: where the cache knows nothing of these kernels
    the processes, and always the reading of all of Triton's files, which its keys are made of. Nothing where there is no Triton."""
    if find_spec("triton") is None:
        return
    with suppress(OSError):
        if not record().exists():
            HELPERS.start()
    from triton.runtime import cache

    read: Callable[[], Any] | None = getattr(cache, "triton_key", None)
    if read is not None and not _READING:
        _READING.append(Thread(target=read, name="triton-key", daemon=True))
        _READING[0].start()


def begun() -> None:
    """Wait for what `begin` started, if it did."""
    for thread in _READING:
        thread.join()


def done() -> None:
    """Note that the cache has what a start needs."""
    with suppress(OSError):
        path = record()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class Worker(NamedTuple):
    """The ends of a process's pipes."""

    jobs: BinaryIO
    answers: BinaryIO


def _server(pipes: Sequence[int]) -> subprocess.Popen[bytes]:
    """The process that forks the others, with its ends of their pipes."""
    command = [sys.executable or "", "-P", "-m", SERVER, *map(str, pipes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, pass_fds=pipes, stdin=nothing, stdout=nothing, stderr=nothing)


@dataclass
class Helpers:
    """The processes of this one: none until a build was slow, or `start` was called."""

    free: SimpleQueue[Worker] = field(default_factory=SimpleQueue)
    server: subprocess.Popen[bytes] | None = None
    workers: list[Worker] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def build(self, build: Callable[[], Any]) -> Any:
        """`build()`, after a process without work has done most of it, if there is one."""
        job = job_of(build) if self.workers else None
        if job is not None:
            self._let(job)
        begun = time.monotonic()
        kernel = build()
        if time.monotonic() - begun > SLOW:
            with suppress(OSError):  # without processes then
                self.start()
        return kernel

    def start(self, number: int = 0) -> None:
        """So many processes, by default one for each processor, unless there are some. They take a second to be ready; until then work
        waits for them. Raises OSError, and leaves nothing behind, if they cannot be started."""
        with self.lock:
            if self.server is not None and self.server.poll() is None:
                return
            self.close()
            pipes: list[tuple[int, int]] = []
            try:
                for _ in range(2 * (number or min(MOST, len(os.sched_getaffinity(0))))):
                    pipes.append(os.pipe())
                pairs = list(zip(pipes[::2], pipes[1::2], strict=True))
                theirs = [end for (jobs, _), (_, answers) in pairs for end in (jobs, answers)]
                self.server = _server(theirs)
            except OSError:
                for end in chain.from_iterable(pipes):
                    os.close(end)
                raise
            for end in theirs:
                os.close(end)
            self.workers += [Worker(os.fdopen(jobs, "wb"), os.fdopen(answers, "rb")) for (_, jobs), (answers, _) in pairs]
        for worker in self.workers:
            self.free.put(worker)

    def _let(self, job: Job) -> None:
        """Have a process build it, if one is free. One that fails is not asked again: `build()` then does all of it."""
        try:
            worker = self.free.get_nowait()
        except Empty:
            return
        try:
            pickle.dump(pickle.dumps(job), worker.jobs)
            worker.jobs.flush()
            if not select.select([worker.answers], [], [], PATIENCE)[0]:
                return
            pickle.load(worker.answers)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            return
        self.free.put(worker)

    def close(self) -> None:
        """End the processes."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        for worker in self.workers:
            for pipe in worker:
                with suppress(OSError):
                    pipe.close()
        self.workers.clear()
        self.free, self.server = SimpleQueue(), None


_READING: list[Thread] = []
HELPERS = Helpers()
atexit.register(HELPERS.close)
