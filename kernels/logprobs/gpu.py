"""What the area `logprobs` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.logprobs import filtered
from modelrunner.kernels.logprobs.ranked import GROUPS, LIST, SQUARE, TILE, WIDE, _rank, _survey, token_logprobs
from modelrunner.kernels.sampling.scan import GROUP

OVERRIDES: dict[str, Callable[..., Any]] = {"token_logprobs": token_logprobs, "processed_logits": filtered.processed_logits}

TYPES = {
    **dict.fromkeys(("stride", "vocab", "groups", "segments", "width"), "i32"),
    **dict.fromkeys(("peaks", "sums", "values_out", "temperature", "top_p", "min_p", "cuts", "out"), "*fp32"),
    **dict.fromkeys(("rows", "wanted", "before", "scratch", "ranks", "ids_out", "top_k"), "*i32"),
    "chosen": "*i64",
}


def _build(kernel: Any, dtype: str, warps: int, spill: int = 0, **constants: Any) -> Build:
    types = {"logits": dtype, **TYPES}
    return Build(kernel, types, {**constants, "PDL": True}, num_warps=warps, max_spill_bytes=spill, divisible=("stride", "vocab"))


def _rank_build(dtype: str) -> Build:
    size = 4 if dtype == "*fp32" else 2
    short = {"TILE": TILE // size, "LIST": LIST, "SQUARE": SQUARE, "WIDE": WIDE, "WIDTH": 32}
    spill = 8 if dtype == "*fp32" else 0  # two words, on some GPUs
    return _build(_rank, dtype, 8, spill, GROUP=GROUP, PLACES=2048, SEGMENTS=64, **short)


def _cut_build(dtype: str, **absent: None) -> Build:
    constants = {"GROUP": GROUP, "PLACES": 2048, "TILE": TILE // (4 if dtype == "*fp32" else 2), "LIST": LIST, "WIDE": filtered.WIDE}
    spill = 32 if dtype == "*fp32" else 0  # a few words of the paths seldom taken, on some GPUs
    return _build(filtered._cut, dtype, 8, spill, **constants, **absent)


BUILDS: list[Build] = [
    *(_build(filtered._group_peaks, dtype, 4, GROUP=GROUP, GROUPS=GROUPS) for dtype in ("*bf16", "*fp32")),
    *(_cut_build(dtype) for dtype in ("*bf16", "*fp16", "*fp32")),
    _cut_build("*bf16", top_k=None, top_p=None, min_p=None, scratch=None),
    *(_build(filtered._lay, dtype, 8, BLOCK=filtered.BLOCK) for dtype in ("*bf16", "*fp32")),
    *(_build(_survey, dtype, 4, GROUP=GROUP, GROUPS=GROUPS) for dtype in ("*bf16", "*fp16", "*fp32")),
    *(_rank_build(dtype) for dtype in ("*bf16", "*fp16", "*fp32")),
]
