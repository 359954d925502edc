"""What the area `speculation` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.speculation.draft import (
    BLOCK,
    draft_inputs,
    draft_pass,
    inputs_kernel,
    pass_kernel,
    spread_kernel,
    spread_rows,
    store_drafts,
    store_kernel,
)
from modelrunner.kernels.speculation.lookup import PIECE, TILE, copy_kernel, match_kernel, ngram_draft

OVERRIDES: dict[str, Callable[..., Any]] = {
    "spread_rows": spread_rows,
    "store_drafts": store_drafts,
    "draft_inputs": draft_inputs,
    "draft_pass": draft_pass,
    "ngram_draft": ngram_draft,
}

_INT32 = [
    *("rows", "query_start", "query_len", "computed", "known", "limit", "finished", "token_ids", "num_drafts", "drafts", "table"),
]
TYPES = {f"{name}_ptr": "*i32" for name in _INT32} | dict.fromkeys(("samples_ptr", "wants_ptr", "valid_ptr"), "*i1")
TYPES |= {"token_row_ptr": "*i64", "positions_ptr": "*i64", "scores_ptr": "*i64", "out_ptr": "*i32"}
TYPES |= {f"{name}_out": "*i32" for name in ("rows", "computed", "query_len", "seq_len", "ahead", "count", "known")}
TYPES |= {f"{name}_out": "*i64" for name in ("newest", "last_place", "next_ids", "positions", "slots")}
TYPES |= {"samples_out": "*i1", "wants_out": "*i1", "valid_out": "*i1"}
_SIZES = ("N", "T", "K", "L", "P", "vocab", "num_draft", "most", "index", "table_stride", "tokens_per_page")
TYPES |= dict.fromkeys((*_SIZES, "pieces", "longest", "out_stride"), "i32")
ROWS = {"BLOCK": BLOCK, "PDL": True}
NO_GROUP: dict[str, Any] = {"table_ptr": None, "slots_out": None}

BUILDS = [
    *(Build(spread_kernel, TYPES, {"SLOTS": slots} | ROWS) for slots in (2, 4, 6, 9, 17)),
    *(Build(store_kernel, TYPES, {"WIDTH": width} | ROWS) for width in (1, 2, 4, 8, 16)),
    Build(inputs_kernel, TYPES, ROWS),
    *(Build(pass_kernel, TYPES, ROWS | more) for more in ({}, NO_GROUP)),
    *(
        Build(match_kernel, TYPES, {"MIN": low, "MAX": high, "PIECE": PIECE, "TILE": TILE, "PDL": True})
        for low, high in ((1, 1), (2, 4), (3, 8))
    ),
    *(Build(copy_kernel, TYPES, {"PIECES": 64, "WIDTH": width, "PDL": True}, num_warps=1) for width in (2, 4, 16)),
]
