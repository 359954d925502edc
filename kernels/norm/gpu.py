"""What the area `norm` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.norm.rows import FIXED_ROWS, add_rms_norm, fixed_rms_norm, norm_kernel, rms_norm, shape

OVERRIDES: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
FIXED: dict[str, Callable[..., Any]] = {"rms_norm": fixed_rms_norm}
_NUMBERS = {"rows": "i32", "inner": "i32", "x_outer": "i32", "x_inner": "i32", "r_outer": "i32", "r_inner": "i32", "eps": "fp32"}


def _build(rows: int, width: int, dtype: str, weight: str, added: bool, late: bool = False) -> Build:
    block, tile, warps = shape(rows, width)
    pointers = {"x_ptr": dtype, "weight_ptr": weight, "out_ptr": dtype} | ({"residual_ptr": dtype, "total_ptr": dtype} if added else {})
    constants: dict[str, Any] = {"D": width, "BLOCK": block, "ROWS": tile, "LATE": late, "PDL": True}
    constants |= {} if added else {"residual_ptr": None, "total_ptr": None}
    divisible = ("x_outer", "x_inner", "r_outer", "r_inner")
    return Build(norm_kernel, {k: f"*{v}" for k, v in pointers.items()} | _NUMBERS, constants, warps, divisible=divisible)


BUILDS: list[Build] = [
    _build(rows, width, dtype, weight, added)
    for rows, width, dtype, weight, added in [
        (1, 576, "bf16", "bf16", True),
        (1, 1024, "bf16", "bf16", False),
        (1, 1024, "bf16", "bf16", True),
        (4096, 128, "bf16", "bf16", False),
        (4096, 256, "bf16", "fp32", False),
        (FIXED_ROWS, 1024, "bf16", "bf16", False),
        (8192, 1024, "bf16", "bf16", True),
        (8192, 4096, "bf16", "bf16", True),
        (8192, 4096, "fp16", "fp16", False),
        (64, 12288, "fp32", "fp32", False),
    ]
]
BUILDS.append(_build(8, 4096, "bf16", "bf16", False, late=True))
