"""What the area `table` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.table.finish import finish_kernel, finish_step, record_kernel, update_state, write_record
from modelrunner.kernels.table.patch import BLOCK, apply_patch, patch_kernel

OVERRIDES: dict[str, Callable[..., Any]] = {
    "apply_patch": apply_patch,
    "update_state": update_state,
    "write_record": write_record,
    "finish_step": finish_step,
}

_INT32 = [
    *("rows", "query_len", "num_tokens", "token_ids", "computed", "known", "finished", "limit", "num_accepted", "seat", "stop_ids"),
    *("finish", "num_drafted", "ring", "generations", "ends", "arena", "start", "words"),
]
TYPES = {f"{name}_ptr": "*i32" for name in _INT32} | dict.fromkeys(("tokens_ptr", "counter_ptr", "dst_ptr"), "*i64")
TYPES |= dict.fromkeys(("samples_ptr", "ok_ptr"), "*i1")
TYPES |= dict.fromkeys(("N", "length", "S", "token_stride", "E", "entry_stride", "row_stride", "num_runs", "num_words", "halvings"), "i32")
NO_RECORD: dict[str, Any] = dict.fromkeys(("ring_ptr", "counter_ptr", "generations_ptr", "num_drafted_ptr"))
NO_DRAFTS: dict[str, Any] = {"num_drafted_ptr": None}
ENDING: tuple[tuple[int, int, dict[str, Any]], ...] = ((1, 16, NO_DRAFTS), (4, 4, {}))  # with rows of automata


def _finish(tokens: int, stops: int, block: int, num_warps: int = 1, **more: Any) -> Build:
    sizes = {"K1": tokens, "WIDTH": 1 << (tokens - 1).bit_length(), "STOPS": stops, "BLOCK": block, "PDL": True, "ends_ptr": None}
    return Build(finish_kernel, TYPES, sizes | more, num_warps)


BUILDS = [
    Build(patch_kernel, TYPES, {"BLOCK": BLOCK}),
    _finish(1, 64, 16, **NO_DRAFTS),
    _finish(1, 16, 32, **NO_DRAFTS),
    _finish(1, 64, 16, num_tokens_ptr=None, **NO_DRAFTS),
    *(Build(finish_kernel, TYPES, {"K1": k1, "WIDTH": k1, "STOPS": 64, "BLOCK": n, "PDL": True} | more, 1) for k1, n, more in ENDING),
    *(_finish(tokens, 64, block) for tokens, block in ((2, 8), (4, 4), (6, 2), (9, 1))),
    _finish(17, 64, 1, num_warps=2),
    _finish(1, 4096, 1, num_warps=4, **NO_DRAFTS),
    _finish(1, 64, 16, **NO_RECORD),
    Build(record_kernel, TYPES, {"K1": 1, "WIDTH": 1, "BLOCK": 32, "PDL": True} | NO_DRAFTS, num_warps=1),
    Build(record_kernel, TYPES, {"K1": 5, "WIDTH": 8, "BLOCK": 32, "PDL": True}, num_warps=1),
]
