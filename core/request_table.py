"""The request table: structure of arrays on the device; a request keeps one row for its active life.

All columns are views of one int32 arena, so that any set of edits is one copy and one kernel (`apply_patch`). The host never holds a second
copy of a column: it stages edits in a `PatchBuilder`, and what the device computes it owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from modelrunner.batch import EMPTY_PATCH, Columns, Int32Array, Patch

NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
RUN_OVERHEAD = 4  # words that a run costs in a packed patch beside its own: destination (2), length (1), start (1)

ONES = np.ones(4096, np.int32)  # lengths of runs of one word
ONES.setflags(write=False)


@dataclass(frozen=True)
class Column:
    """A column of the request table, declared by the feature that owns it.

    dtype: int32, int64 or float32. width: elements per row (1: the column's tensor is [rows], else [rows, width]). default: fills a row
    when the owner gives no value.
    seats: None for a plain column. A number for a seated one: that many lines exist (a capacity), a row holds the id of its seat
    or -1, and a request that needs a seat is admitted only when one is free. The ids are found as `name`, the lines as `name.seats`,
    [seats + 1, width]: the last line always holds defaults, so that -1 indexes it.
    on_device: the lines of a seated column are the device's to fill; the host gives a seat only, and never writes its line.
    """

    name: str
    dtype: torch.dtype
    width: int = 1
    default: int | float = 0
    seats: int | None = None
    on_device: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"column {self.name!r}: a text that is not empty is needed as its name")
        if not isinstance(self.width, Integral) or not isinstance(self.default, Real):
            raise TypeError(f"column {self.name!r}: width {self.width!r} must be a whole number and default {self.default!r} a number")
        if self.dtype not in NUMPY_DTYPES:
            raise ValueError(f"column {self.name!r}: dtype {self.dtype} is not one of {sorted(map(str, NUMPY_DTYPES))}")
        if self.width < 1 or (self.seats is not None and self.seats < 0):
            raise ValueError(f"column {self.name!r}: width {self.width} must be at least 1 and seats {self.seats} not negative")
        if self.on_device and self.seats is None:
            raise ValueError(f"column {self.name!r}: only a seated column has lines that the device fills (on_device)")

    @property
    def words(self) -> int:
        """32-bit words of one element."""
        return 2 if self.dtype == torch.int64 else 1

    def encode(self, value: Any) -> Int32Array:
        """Bit-cast a scalar or a one-dimensional array of elements to words."""
        array = np.ascontiguousarray(np.atleast_1d(np.asarray(value, dtype=NUMPY_DTYPES[self.dtype])))
        if array.ndim != 1 or array.size > self.width:
            raise ValueError(f"column {self.name!r} takes up to {self.width} elements a row; got shape {array.shape}")
        return array.view(np.int32)


@dataclass(frozen=True)
class _Region:
    """Where a column lies in the arena: `base` word, `stride` words a line, `lines` lines."""

    column: Column
    base: int
    stride: int
    lines: int


class RequestTable:
    """Columns of `max_rows` requests and one scratch row (the last, for padding) on a device.

    columns: name -> view of the arena, [max_rows + 1] or [max_rows + 1, width]. A view never moves.
    """

    def __init__(self, columns: Sequence[Column], max_rows: int, torch_device: torch.device, max_patch_words: int = 1 << 30) -> None:
        """max_patch_words: capacity of one patch, in 32-bit words, overhead included. Raises ValueError for a column name used twice."""
        names = [c.name for c in columns]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"request-table columns declared twice: {twice}; rename one")
        self.max_rows = max_rows
        self.num_rows = max_rows + 1
        self.max_patch_words = max_patch_words
        self.regions: dict[str, _Region] = {}
        self.seats: dict[str, int] = {c.name: c.seats for c in columns if c.seats is not None}
        end = 0
        for column in columns:
            if column.seats is None:
                end = self._place(column.name, column, self.num_rows, end)
            else:
                end = self._place(column.name, Column(column.name, torch.int32, default=-1), self.num_rows, end)
                end = self._place(f"{column.name}.seats", column, column.seats + 1, end)
        self.arena = torch.zeros(end, dtype=torch.int32, device=torch_device)
        self.columns = Columns({name: self._view(region) for name, region in self.regions.items()})
        for name, region in self.regions.items():
            self.columns[name].fill_(region.column.default)
        self.scalars = [r for n, r in self.regions.items() if r.column.width == 1 and r.column.words == 1 and not n.endswith(".seats")]
        self.wide = {n: r for n, r in self.regions.items() if r not in self.scalars and not n.endswith(".seats")}
        self.scalar_index = {r.column.name: i for i, r in enumerate(self.scalars)}
        self.scalar_base = np.array([r.base for r in self.scalars], np.int64)
        self.scalar_types = [{torch.int32: int, torch.float32: float}[r.column.dtype] for r in self.scalars]
        self.scalar_lengths = np.ones(len(self.scalars), np.int32)
        self.scalar_default = np.concatenate([r.column.encode(r.column.default) for r in self.scalars] or [np.empty(0, np.int32)])

    def _place(self, name: str, column: Column, lines: int, end: int) -> int:
        base = end + end % 2  # 64-bit columns need even words
        self.regions[name] = region = _Region(column, base, column.width * column.words, lines)
        return base + region.stride * lines

    def _view(self, region: _Region) -> torch.Tensor:
        flat = self.arena[region.base : region.base + region.stride * region.lines].view(region.column.dtype)
        return flat if region.column.width == 1 and region.column.seats is None else flat.view(region.lines, region.column.width)

    def builder(self) -> PatchBuilder:
        """Start collecting the edits of a step."""
        return PatchBuilder(self)


class PatchBuilder:
    """Collects edits; `build()` freezes them. The caller edits each element at most once a patch."""

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self._dst: list[npt.NDArray[np.int64]] = []
        self._length: list[Int32Array] = []
        self._words: list[Int32Array] = []
        self.num_words = 0

    def fits(self, num_words: int) -> bool:
        """Whether edits of that many more words, `RUN_OVERHEAD` a run included, keep the patch within its capacity."""
        return self.num_words + num_words <= self.table.max_patch_words

    def row_words(self, values: Mapping[str, Any]) -> int:
        """Upper bound of the words that `row(row, values)` adds. values: of seated columns too, with or without their seats."""
        words = (RUN_OVERHEAD + 2) * len(self.table.regions)
        for name, value in values.items():
            line = self.table.regions.get(f"{name}.seats")
            if line is None:
                words += 2 * (1 if isinstance(value, (int, float)) else int(np.size(value))) + RUN_OVERHEAD
            elif not line.column.on_device:
                words += line.stride + RUN_OVERHEAD
        return words

    def row(self, row: int, values: Mapping[str, Any]) -> None:
        """(Re)set every column of `row`: `values` by column name, unnamed ones to their default.

        A column of width > 1 takes an array of up to `width` elements; only those are written, what lies behind them stays (a prompt
        does not cost the longest prompt). A seated column takes (seat id, elements), whose rest is filled with the default. Raises
        KeyError for an unknown column, ValueError for a value that its column cannot take.
        """
        table = self.table
        if unknown := values.keys() - table.scalar_index.keys() - table.wide.keys():
            raise KeyError(f"no request-table column {sorted(unknown)}; there are {sorted(table.scalar_index.keys() | table.wide.keys())}")
        words = table.scalar_default.copy()
        views: dict[type, Any] = {int: words, float: words.view(np.float32)}
        for name, value in values.items():
            place = table.scalar_index.get(name)
            if isinstance(value, tuple):
                words[table.scalar_index[name]] = value[0]
                self._seat(name, *value)
            elif name in table.seats:
                raise ValueError(f"column {name!r} is seated; it takes (seat id, elements), got {value!r}")
            elif place is None:
                continue
            elif type(value) is table.scalar_types[place]:  # as `encode` does it, in a tenth of the time
                views[type(value)][place] = value
            else:
                words[place] = table.scalars[place].column.encode(value)[0]
        self._add(table.scalar_base + row, table.scalar_lengths, words)
        for name, region in table.wide.items():
            if name in values:
                self._run(region.base + row * region.stride, region.column.encode(values[name]))
            elif region.column.width == 1:
                self._run(region.base + row * region.stride, region.column.encode(region.column.default))

    def _seat(self, name: str, seat: int, elements: Any) -> None:
        region = self.table.regions[f"{name}.seats"]
        if not 0 <= seat < region.lines - 1:
            raise ValueError(f"column {name!r} has seats 0 to {region.lines - 2}; got {seat}")
        if region.column.on_device:
            return
        line = np.full(region.column.width, region.column.default, NUMPY_DTYPES[region.column.dtype])
        given = np.atleast_1d(np.asarray(elements))
        line[: given.size] = given
        self._run(region.base + seat * region.stride, line.view(np.int32))

    def line(self, name: str, seat: int, elements: Int32Array) -> None:
        """Set the first elements of a seat's line of a 32-bit seated column."""
        region = self.table.regions[f"{name}.seats"]
        self._run(region.base + seat * region.stride, region.column.encode(elements).copy())

    def elements(self, name: str, rows: npt.NDArray[Any], cols: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """Set single elements [row, col] of a 32-bit column: three arrays of one length, which the patch may keep."""
        region = self.table.regions[name]
        if region.column.words != 1:
            raise ValueError(f"column {name!r} has 64-bit elements; only whole rows can be set")
        dtype = NUMPY_DTYPES[region.column.dtype]
        words = values if values.dtype == dtype == np.int32 else np.ascontiguousarray(values, dtype=dtype).view(np.int32)
        if rows.size == 1:
            dst = np.array([region.base + rows.item() * region.stride + cols.item()], np.int64)
        else:
            dst = rows * np.int64(region.stride)
            dst += cols
            dst += region.base
        self._add(dst, ONES[: words.size] if words.size <= ONES.size else np.ones(words.size, np.int32), words)

    def _run(self, dst: int, words: Int32Array) -> None:
        if words.size:
            self._add(np.array([dst], np.int64), np.array([words.size], np.int32), words)

    def _add(self, dst: npt.NDArray[np.int64], length: Int32Array, words: Int32Array) -> None:
        self._dst.append(dst)
        self._length.append(length)
        self._words.append(words)
        self.num_words += words.size + RUN_OVERHEAD * dst.size

    def build(self) -> Patch:
        """The patch of all edits so far. Raises AssertionError beyond the table's patch capacity (ask `fits` before)."""
        assert self.num_words <= self.table.max_patch_words, (self.num_words, self.table.max_patch_words)
        if not self._dst:
            return EMPTY_PATCH
        if len(self._dst) == 1:
            return Patch(self._dst[0], self._length[0], self._words[0])
        return Patch(np.concatenate(self._dst), np.concatenate(self._length), np.concatenate(self._words))
