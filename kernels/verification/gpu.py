"""What the area `verification` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.sampling.gpu import FILTERED, _settle_build
from modelrunner.kernels.verification.verify import BLOCK, STEPS, _accept, _recover, _sums, verify_drafts

OVERRIDES: dict[str, Callable[..., Any]] = {"verify_drafts": verify_drafts}

TYPES = {
    **dict.fromkeys(("longest", "lines", "stride", "vocab", "segments", "K"), "i32"),
    **dict.fromkeys(("rows", "computed", "query_len", "token_ids", "choice", "places", "counts"), "*i32"),
    **dict.fromkeys(("temperature", "heats", "sums", "found", "draft_probs"), "*fp32"),
    **dict.fromkeys(("tokens", "seed"), "*i64"),
    **dict.fromkeys(("good", "samples", "ok"), "*i1"),
    **dict.fromkeys(("threshold", "factor"), "fp32"),
}
JUDGING = ("heats", "scores", "sums", "found", "places", "draft_probs")


def _build(kernel: Any, dtype: str = "*fp32", absent: tuple[str, ...] = (), warps: int = 4, **constants: Any) -> Build:
    """absent: arguments that are None."""
    missing = {name: None for name in absent if name in kernel.arg_names}
    return Build(kernel, {**TYPES, "scores": dtype}, {**missing, **constants, "PDL": True}, num_warps=warps, divisible=("stride", "vocab"))


def _accept_build(k: int, absent: tuple[str, ...], judged: bool, typical: bool = False, dtype: str = "*bf16") -> Build:
    width = max(2, 1 << k.bit_length())
    return _build(_accept, dtype, absent, 1, WIDTH=width, PARTS=64, JUDGED=judged, TYPICAL=typical)


BUILDS: list[Build] = [
    _settle_build("*bf16", (*FILTERED, "samples", "counts")),
    *(_settle_build(dtype, ("samples", "counts")) for dtype in ("*bf16", "*fp32")),
    *(_accept_build(k, (*JUDGING, "temperature"), False) for k in (1, 3, 5)),
    *(_accept_build(k, JUDGING, False) for k in (1, 3, 5)),
    _accept_build(3, (), True),
    _accept_build(3, ("heats",), True, dtype="*fp32"),
    _accept_build(3, ("found", "places", "draft_probs"), True, True),
    *(_build(_sums, dtype, BLOCK=BLOCK, STEPS=STEPS) for dtype in ("*bf16", "*fp32")),
    _build(_sums, "*fp32", ("heats",), BLOCK=BLOCK, STEPS=STEPS),
    *(_build(_recover, dtype, BLOCK=BLOCK, STEPS=STEPS, PARTS=64) for dtype in ("*bf16", "*fp32")),
    _build(_recover, "*fp32", ("heats",), BLOCK=BLOCK, STEPS=STEPS, PARTS=64),
]
