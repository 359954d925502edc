"""Tensors for another process of this machine, in memory that both see: written once, read in place.

    file = TensorFile()
    file.add("model.norm.weight", tensor)
    ...                                                   # `file.path` and `file.entries` go to the other process, which runs
    for name, tensor in read_tensors(path, entries): ...
    file.close()

On Linux the memory has no name in any folder (`memfd`): it needs no room in /dev/shm, and is gone when the last process that uses it is,
however that ends. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from modelrunner.errors import CheckpointError
from modelrunner.messages import TensorEntry

ALIGNMENT = 64  # bytes; at least the size of any element


class TensorFile:
    """Holds copies of tensors until `close`. path: how other processes of this user open it. entries: what lies where."""

    def __init__(self) -> None:
        self.entries: list[TensorEntry] = []
        self._size = 0
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("modelrunner-weights")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="modelrunner-weights-")
        self._finalizer = weakref.finalize(self, discard, self._descriptor, self.path)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a copy of `tensor`: any shape, dtype and device. Raises CheckpointError for what is no tensor, OSError without room."""
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"the new weights: got {name!r} with a {type(tensor).__name__}; pairs of a name and a torch.Tensor are needed"
            )
        data = tensor.detach().cpu().contiguous()
        self._write(b"\0" * (-self._size % ALIGNMENT))
        self.entries.append(TensorEntry(name, str(data.dtype).removeprefix("torch."), list(data.shape), self._size))
        self._write(data.reshape(-1).view(torch.uint8).numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:  # one call writes at most 2 GiB
            done = os.write(self._descriptor, left)
            left, self._size = left[done:], self._size + done

    def close(self) -> None:
        """Give the memory up; a process that reads it keeps it until it has done."""
        self._finalizer()


def discard(descriptor: int, path: str) -> None:
    os.close(descriptor)
    if not path.startswith("/proc/"):
        os.unlink(path)


def pack(tensors: Iterable[tuple[str, torch.Tensor]], given_up: Callable[[], bool]) -> TensorFile | None:
    """A file of all `tensors`; None when `given_up` before the last. Raises what the iteration raises."""
    file = TensorFile()
    try:
        for name, tensor in tensors:
            if given_up():
                file.close()
                return None
            file.add(name, tensor)
    except BaseException:
        file.close()
        raise
    return file


def read_tensors(path: str, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of each entry, without a copy: what is written to a tensor does not reach the file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else bytearray()
    for entry in entries:
        dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset) if count else torch.empty(0, dtype=dtype)
        yield entry.name, flat.reshape(entry.shape)
