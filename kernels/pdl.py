"""Programmatic dependent launch: a kernel that may start while its predecessor in the stream still runs.

Such a kernel calls `gdc_launch_dependents()` first, then reads what no kernel before it writes (weights), calls `gdc_wait()`, and only then
reads inputs and writes outputs. Every program of it must wait, or it could finish before its predecessor does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_OFF: dict[str, Any] = {"PDL": False}
_ON: dict[str, Any] = {"PDL": True, "launch_pdl": True}


def pdl(x: torch.Tensor) -> dict[str, Any]:
    """What to pass to the launch of a kernel with a constant PDL on x's device: on from compute capability 9.0 on."""
    return _for_device(x.device.index) if x.is_cuda else _OFF


def hopper(x: torch.Tensor) -> bool:
    """Whether x is on a GPU of compute capability 9."""
    return x.is_cuda and _capability(x.device.index)[0] == 9


@cache
def _for_device(index: int) -> dict[str, Any]:
    return _ON if _capability(index) >= (9, 0) else _OFF


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@triton.jit
def wait_in_loop():
    """`gdc_wait` for a loop that reads nothing which the kernel before writes: newer versions of Triton move no load before `gdc_wait`, and
    so would not pipeline the loop.
    """
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
