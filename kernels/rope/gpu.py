"""Rotary embedding on NVIDIA GPUs: the operation that the Triton kernel replaces, and the configurations to build ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.rope.rotate import apply_rope, rotate

OVERRIDES: dict[str, Callable[..., Any]] = {"apply_rope": apply_rope}


def _build(kind: str, heads: int, kv_heads: int, dim: int) -> Build:
    values = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), f"*{kind}")
    steps = ("q_token", "q_head", "k_token", "k_head", "cos_sin_row")
    signature = values | {"positions_ptr": "*i64", "cos_sin_ptr": "*fp32"} | dict.fromkeys(steps, "i32")
    constants = {"HQ": heads, "HK": kv_heads, "D": dim, "R": dim, "HAS_POSITIONS": False}
    blocks = {"BLOCK_H": 16, "BLOCK_HALF": dim // 2, "BLOCK_REST": 1, "PDL": True}
    return Build(rotate, signature, constants | blocks, num_warps=4, divisible=steps)


BUILDS = [_build("bf16", 16, 8, 128), _build("bf16", 9, 3, 64), _build("fp32", 9, 3, 64)]
