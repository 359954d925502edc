"""What the area `logits` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.logits.count import BLOCK as COUNT_BLOCK
from modelrunner.kernels.logits.count import _count_tokens, count_tokens
from modelrunner.kernels.logits.edit import BLOCK, ENTRIES, SPAN, _edit_all, _edit_named, _mask_all, edit_logits, mask_logits

OVERRIDES: dict[str, Callable[..., Any]] = {"count_tokens": count_tokens, "edit_logits": edit_logits, "mask_logits": mask_logits}

SEATS = ("allow_seats", "bias_seats", "stop_seats", "word_seats", "count_seats", "seats", "states", "state_masks")
LISTS = ("masks", "biases", "stop_ids", "bad_words", "counts", "rows", "known", "prompt_len", "token_ids", "min_total", "counted", "ahead")
TYPES = dict.fromkeys((*SEATS, *LISTS), "*i32") | dict.fromkeys(("repetition", "presence", "frequency", "out"), "*fp32")
TYPES |= dict.fromkeys(("stride", "vocab", "longest", "words", "num_bias", "num_stops", "num_words"), "i32") | {"samples": "*i1"}


def _build(kernel: Any, dtype: str, warps: int = 4, out: str = "*fp32", **constants: Any) -> Build:
    return Build(kernel, {"logits": dtype, **TYPES, "out": out}, {**constants, "PDL": True}, num_warps=warps, divisible=("stride", "vocab"))


NO_DRAFTS: dict[str, Any] = {"ahead": None}
BY_LINE: dict[str, Any] = {"rows": None}
BUILDS: list[Build] = [
    *(_build(_edit_all, dtype, BLOCK=BLOCK, **some) for dtype in ("*bf16", "*fp16", "*fp32") for some in (NO_DRAFTS, {})),
    *(_build(_edit_all, dtype, out=dtype, BLOCK=BLOCK, **NO_DRAFTS) for dtype in ("*bf16", "*fp16")),
    *(_build(_edit_named, dtype, 2, ENTRIES=ENTRIES, TOKENS=8, **some) for dtype in ("*bf16", "*fp32") for some in (NO_DRAFTS, {})),
    *(_build(_mask_all, dtype, BLOCK=BLOCK, SPAN=SPAN) for dtype in ("*bf16", "*fp16", "*fp32")),
    *(_build(_mask_all, "*bf16", BLOCK=BLOCK, SPAN=SPAN, allow_seats=None, masks=None, **some) for some in ({}, BY_LINE)),
    _build(_count_tokens, "*bf16", BLOCK=COUNT_BLOCK),
]
