"""What the area `activation` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.activation.gated import GELU_TANH, SILU, gated_kernel, gelu_tanh_mul, silu_mul
from modelrunner.kernels.builds import Build

OVERRIDES: dict[str, Callable[..., Any]] = {"silu_mul": silu_mul, "gelu_tanh_mul": gelu_tanh_mul}
BUILDS: list[Build] = [
    Build(
        gated_kernel,
        {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "inner": "i32", "x_outer": "i32", "x_inner": "i32", "width": "i32"},
        {"ACT": act, "BLOCK": 1024, "PDL": True},
        num_warps=4,
        divisible=("x_outer", "x_inner", "width"),
    )
    for act, dtype in [(SILU, "bf16"), (SILU, "fp32"), (GELU_TANH, "bf16"), (GELU_TANH, "fp16")]
]
