"""Named operations: a reference for each, overrides by device type, and optional fusions.

The reference is the specification: plain torch, in `modelrunner.kernels.<area>.reference`. A plugin registers operations, overrides and
fusions through the `kernels` hook; at engine start `Registry.resolve` settles each name once, and layers call `ops.<name>(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Function = Callable[..., Any]


@dataclass(frozen=True)
class Tolerance:
    """How far an override may be from the reference, per dtype: {dtype: (relative, absolute)}; a dtype not named must match bit for bit."""

    by_dtype: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)


EXACT = Tolerance()
CLOSE = Tolerance({torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)})


class Register(Protocol):
    """What the `kernels` hook is handed. A second owner of a name is refused, naming both."""

    def op(self, name: str, reference: Function, *, area: str, tolerance: Tolerance = EXACT) -> None:
        """Register a new operation. Its signature is that of `reference`."""

    def override(self, name: str, function: Function, *, device_type: str, supports: Callable[[], str | None] | None = None) -> None:
        """Replace `name` on a device type. `supports()` returns None, or the reason why the reference must run instead."""

    def fusion(self, name: str, of: tuple[str, ...], chain: Callable[..., Function], fused: Function | None = None, *, device_type: str = "") -> None:
        """Register a fused form of the operations `of`. `chain(ops)` returns the plain function built from them; `fused` runs only on
        `device_type`, and only while none of `of` is overridden by somebody else."""


class Ops:
    """Resolved operations, as attributes. `explain()` tells which implementation each name got, and why."""

    def __init__(self, functions: Mapping[str, Function], reasons: Mapping[str, str]) -> None:
        self.__dict__.update(functions)
        self._reasons = dict(reasons)

    def explain(self) -> dict[str, str]:
        return dict(self._reasons)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no operation {name!r}; registered are {sorted(self._reasons)}")
