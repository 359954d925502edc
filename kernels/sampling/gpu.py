"""What the area `sampling` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.sampling.noise import _gumbel_noise, gumbel_noise
from modelrunner.kernels.sampling.scan import CHUNK, _scan
from modelrunner.kernels.sampling.settle import WIDE, _settle, greedy, sample

OVERRIDES: dict[str, Callable[..., Any]] = {"greedy": greedy, "sample": sample, "gumbel_noise": gumbel_noise}

COLUMNS = {"temperature": "*fp32", "seed": "*i64", "position": "*i32", "choice": "*i32"}
FILTERS = {"top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}


def _scan_build(dtype: str, noise: bool, steps: int) -> Build:
    shape = {"logits": dtype, "stride": "i32", "vocab": "i32", "peaks": "*fp32", "times": "*fp32", "chunks": "i32", "segments": "i32"}
    absent = {} if noise else dict.fromkeys(COLUMNS)
    constants = {**absent, "CHUNK": CHUNK, "STEPS": steps, "NOISE": noise}
    return Build(_scan, {**shape, **COLUMNS}, constants, divisible=("stride", "vocab"))


def _settle_build(dtype: str, noise: bool, filters: bool) -> Build:
    shape = {"logits": dtype, "stride": "i32", "vocab": "i32", "peaks": "*fp32", "times": "*fp32", "chunks": "i32"}
    absent = ({} if noise else dict.fromkeys(COLUMNS)) | ({} if filters else dict.fromkeys(FILTERS))
    constants = {**absent, "CHUNK": CHUNK, "PLACES": 256, "WIDE": WIDE, "NOISE": noise}
    types = {**shape, **COLUMNS, **FILTERS, "tokens": "*i64", "good": "*i1"}
    return Build(_settle, types, constants, num_warps=8 if filters else 4, divisible=("stride", "vocab"))


BUILDS: list[Build] = [
    *(_scan_build(dtype, noise, steps) for dtype, steps in (("*bf16", 1), ("*bf16", 8), ("*fp32", 8)) for noise in (False, True)),
    *(_settle_build("*bf16", noise, filters) for noise, filters in ((False, False), (True, False), (True, True))),
    _settle_build("*fp16", True, True),
    _settle_build("*fp32", True, True),
    Build(
        _gumbel_noise,
        {"seed": "*i64", "position": "*i32", "choice": "*i32", "out": "*fp32", "vocab": "i32", "blocks": "i32"},
        {"PURPOSE": 0, "BLOCK": 1024},
    ),
]
