"""What the area `sampling` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.sampling.launch import LIST, TILE, WIDE, greedy, greedy_rows, sample, sample_rows
from modelrunner.kernels.sampling.noise import _gumbel_noise, gumbel_noise
from modelrunner.kernels.sampling.scan import CHUNK, GROUP, _scan
from modelrunner.kernels.sampling.settle import _confirm, _settle, _weigh

OVERRIDES: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "sample": sample,
    "gumbel_noise": gumbel_noise,
    "greedy_rows": greedy_rows,
    "sample_rows": sample_rows,
}

TYPES = {
    **dict.fromkeys(("stride", "vocab", "chunks", "segments", "parts", "steps"), "i32"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "peaks", "times", "group_peaks", "state"), "*fp32"),
    **dict.fromkeys(("rows", "top_k", "position", "more", "choice", "scratch", "counts"), "*i32"),
    **dict.fromkeys(("seed", "tokens", "sums"), "*i64"),
    **dict.fromkeys(("samples", "good"), "*i1"),
}
FILTERED = ("top_k", "group_peaks", "scratch")
DRAWN = ("rows", "temperature", "top_p", "min_p", "seed", "position", "more", "choice", "state")


def _build(kernel: Any, dtype: str, absent: tuple[str, ...] = (), warps: int = 4, spill: int = 0, **constants: Any) -> Build:
    """absent: arguments that are None."""
    missing = {name: None for name in absent if name in kernel.arg_names}
    return Build(
        kernel,
        {"logits": dtype, **TYPES},
        {**missing, **constants, "PDL": True},
        num_warps=warps,
        max_spill_bytes=spill,
        divisible=("stride", "vocab"),
    )


def _settle_build(dtype: str, absent: tuple[str, ...], noise: bool = True) -> Build:
    short = {"GROUP": GROUP, "GROUPS": 2048, "TILE": TILE // (4 if dtype == "*fp32" else 2), "LIST": LIST, "WIDE": WIDE}
    warps = 4 if "top_k" in absent else 8
    # For float32 some versions of the assembler keep a few words of the paths seldom taken in memory.
    spill = 32 if dtype == "*fp32" else 0
    return _build(_settle, dtype, absent, warps, spill, CHUNK=CHUNK, PLACES=256, **short, NOISE=noise)


def _scan_build(dtype: str, absent: tuple[str, ...], tile: int, noise: bool = True) -> Build:
    return _build(_scan, dtype, absent, CHUNK=CHUNK, GROUP=GROUP, TILE=tile, NOISE=noise)


BUILDS: list[Build] = [
    *(_scan_build(dtype, FILTERED + DRAWN, tile, False) for dtype in ("*bf16", "*fp32") for tile in (1, 2)),
    *(_scan_build(dtype, absent, tile) for dtype in ("*bf16", "*fp32") for absent in (FILTERED, ()) for tile in (1, 2)),
    _settle_build("*bf16", FILTERED + DRAWN, False),
    _settle_build("*bf16", (*FILTERED, "top_p", "min_p", "state")),
    *(_settle_build(dtype, ()) for dtype in ("*bf16", "*fp16", "*fp32")),
    _build(_weigh, "*bf16", CHUNK=CHUNK),
    _build(_confirm, "*bf16", CHUNK=CHUNK, PLACES=256),
    Build(_gumbel_noise, {**TYPES, "out": "*fp32", "blocks": "i32"}, {"PURPOSE": 0, "BLOCK": 1024}, divisible=("vocab",)),
]
