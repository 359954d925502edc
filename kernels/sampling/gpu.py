"""What the area `sampling` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.sampling import scan
from modelrunner.kernels.sampling.launch import LIST, MANY, TILE, WARPS, WIDE, greedy, greedy_rows, sample, sample_rows
from modelrunner.kernels.sampling.noise import _gumbel_noise, gumbel_noise
from modelrunner.kernels.sampling.scan import GROUP, _scan
from modelrunner.kernels.sampling.settle import _confirm, _settle, _weigh

OVERRIDES: dict[str, Callable[..., Any]] = {
    "greedy": greedy,
    "sample": sample,
    "gumbel_noise": gumbel_noise,
    "greedy_rows": greedy_rows,
    "sample_rows": sample_rows,
}

TYPES = {
    **dict.fromkeys(("stride", "vocab", "groups", "segments", "parts", "steps"), "i32"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "peaks", "state", "weights"), "*fp32"),
    **dict.fromkeys(("rows", "top_k", "position", "more", "choice", "masses", "scratch", "counts", "tries"), "*i32"),
    **dict.fromkeys(("seed", "tokens"), "*i64"),
    **dict.fromkeys(("samples", "good"), "*i1"),
}
FILTERED = ("top_k", "top_p", "min_p", "scratch", "state", "tries")
DRAWN = ("rows", "temperature", "masses", "seed", "position", "more", "choice")


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


def _settle_build(dtype: str, absent: tuple[str, ...]) -> Build:
    short = {"TILE": TILE // (4 if dtype == "*fp32" else 2), "LIST": LIST, "WIDE": WIDE}
    # Some versions of the assembler keep a few words of the paths seldom taken in memory.
    spill = 0 if "scratch" in absent else 32
    return _build(_settle, dtype, absent, WARPS["scratch" not in absent], spill, GROUP=GROUP, PLACES=2048, **short)


BUILDS: list[Build] = [
    *(
        _build(_scan, dtype, absent, GROUP=GROUP, TILE=scan.TILE)
        for dtype in ("*bf16", "*fp32")
        for absent in (FILTERED + DRAWN, FILTERED, ())
    ),
    _settle_build("*bf16", FILTERED + DRAWN),
    _settle_build("*bf16", FILTERED),
    *(_settle_build(dtype, ()) for dtype in ("*bf16", "*fp16", "*fp32")),
    *(_build(_weigh, dtype, GROUP=GROUP, TILE=scan.TILE) for dtype in ("*bf16", "*fp32")),
    *(_build(_confirm, dtype, warps=WARPS[0], GROUP=GROUP, PLACES=2048, MANY=MANY) for dtype in ("*bf16", "*fp32")),
    Build(_gumbel_noise, {**TYPES, "out": "*fp32", "blocks": "i32"}, {"PURPOSE": 0, "BLOCK": 1024}, divisible=("vocab",)),
]
