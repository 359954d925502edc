"""The GGUF container: metadata and tensor table, read without torch and without the `gguf` package (which takes seconds for a vocabulary).

Layout, little-endian (ggml's `docs/gguf.md`, version 3; version 2 is the same on disk): magic, version u32, tensor count u64, entry
count u64; entries (key, type u32, value); tensor table (name, number of dimensions u32, dimensions u64 fastest first, type u32,
offset u64); padding to `general.alignment`; data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modelrunner.errors import CheckpointError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, F16, BF16 = 0, 1, 30
PLAIN: dict[int, np.dtype[Any]] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2")}


@dataclass(frozen=True)
class GGUFTensor:
    """A line of the tensor table. shape: slowest dimension first, as torch counts. type: ggml's number. start: byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


class _Cursor:
    """Reads values one after the other; running past the end says so."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from("<" + layout, self.data, self.at)
        except struct.error:
            raise self.truncated() from None
        self.at += struct.calcsize("<" + layout)
        return values

    def truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated: its header wants more bytes than the file's {len(self.data)}")

    def string(self) -> str:
        (size,) = self.unpack("Q")
        if size > len(self.data) - self.at:
            raise self.truncated()
        text = self.data[self.at : self.at + size].decode("utf-8", errors="replace")
        self.at += size
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.unpack("IQ")
            if count > len(self.data) - self.at:  # an element takes at least one byte
                raise self.truncated()
            if inner in SCALARS:
                return list(self.unpack(f"{count}{SCALARS[inner]}"))
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise CheckpointError(
                f"{self.path}: metadata value of unknown type {kind} at byte {self.at}; the file is damaged or newer than GGUF 3"
            )
        return self.unpack(SCALARS[kind])[0]


class GGUFFile:
    """An open GGUF file: `metadata` (plain Python values) and `tensors` (the table). The file is mapped, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
        if self.data[:4] != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {bytes(self.data[:4])!r}, not {MAGIC!r}")
        cursor = _Cursor(path, self.data)
        cursor.at = len(MAGIC)
        version, num_tensors, num_entries = cursor.unpack("IQQ")
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.string()
            (kind,) = cursor.unpack("I")
            self.metadata[key] = cursor.value(kind)
        self.tensors = self._table(cursor, num_tensors)

    def _table(self, cursor: _Cursor, count: int) -> list[GGUFTensor]:
        lines = []
        for _ in range(count):
            name = cursor.string()
            (dims,) = cursor.unpack("I")
            shape = cursor.unpack(f"{dims}Q")[::-1]
            kind, offset = cursor.unpack("IQ")
            lines.append((name, shape, kind, offset))
        alignment = int(self.metadata.get("general.alignment", 32))
        base = -(-cursor.at // alignment) * alignment
        return [GGUFTensor(name, shape, kind, base + offset) for name, shape, kind, offset in lines]

    def raw(self, info: GGUFTensor, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, still mapped. Raises CheckpointError when the file ends before them."""
        if info.start + num_bytes > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {info.name} ends at byte {info.start + num_bytes}, the file at {len(self.data)}"
            )
        return np.frombuffer(self.data, np.uint8, num_bytes, info.start)


def dequantize(file: GGUFFile, info: GGUFTensor) -> npt.NDArray[Any]:
    """The tensor as a new float array of `info.shape` (float16 stays, all else becomes float32). Block formats need the package `gguf`."""
    count = math.prod(info.shape)
    if info.type in PLAIN:
        dtype = PLAIN[info.type]
        plain = file.raw(info, count * dtype.itemsize).view(dtype).reshape(info.shape)
        return (plain.astype(np.uint32) << 16).view(np.float32) if info.type == BF16 else plain.copy()
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    except ImportError as error:
        raise CheckpointError(
            f"{file.path}: tensor {info.name} is quantised (ggml type {info.type}), which needs a package: pip install 'modelrunner[gguf]'"
        ) from error
    try:
        kind = GGMLQuantizationType(info.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        rows = file.raw(info, count // block * block_bytes).reshape(*info.shape[:-1], -1)
        return np.ascontiguousarray(quants.dequantize(rows, kind), dtype=np.float32).reshape(info.shape)
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{file.path}: tensor {info.name} of ggml type {info.type} cannot be dequantised: {error}") from error
