"""What the area `batch` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.batch.gather import block_table_kernel, rows_kernel, slots_kernel, step_kernel, tokens_kernel
from modelrunner.kernels.batch.launch import BLOCK, PAGES, gather_block_table, gather_rows, gather_step, gather_tokens, slot_mapping
from modelrunner.kernels.builds import Build

OVERRIDES: dict[str, Callable[..., Any]] = {
    "gather_rows": gather_rows,
    "gather_tokens": gather_tokens,
    "gather_block_table": gather_block_table,
    "slot_mapping": slot_mapping,
    "gather_step": gather_step,
}

_INT32 = [
    *("rows", "num_query", "generations", "query_start", "query_len", "computed", "known", "finished", "generation", "num_accepted"),
    *("token_ids", "table", "drafts"),
]
TYPES = {f"{name}_ptr": "*i32" for name in _INT32} | {"token_row_ptr": "*i64", "positions_ptr": "*i64", "valid_ptr": "*i1"}
TYPES |= {f"{name}_out": "*i32" for name in ("query_len", "computed", "seq_len", "num_accepted", "block_table")}
TYPES |= {f"{name}_out": "*i64" for name in ("sample_index", "input_ids", "positions", "token_row", "slots")}
TYPES |= {"samples_out": "*i1", "token_valid_out": "*i1"}
TYPES |= dict.fromkeys(("N", "T", "P", "L", "table_stride", "tokens_per_page", "halvings", "token_programs"), "i32")
NO_DRAFTS: dict[str, Any] = {"drafts_ptr": None}
STEP = {"BLOCK": BLOCK, "PAGES": PAGES, "PDL": True}

BUILDS = [
    *(Build(rows_kernel, TYPES, {"BLOCK": BLOCK, "PDL": True} | more) for more in (NO_DRAFTS, {})),
    Build(tokens_kernel, TYPES, {"BLOCK": BLOCK, "PDL": True}),
    Build(block_table_kernel, TYPES | {"out_ptr": "*i32"}, {"BLOCK": PAGES, "PDL": True}),
    Build(slots_kernel, TYPES | {"out_ptr": "*i64"}, {"BLOCK": BLOCK, "PDL": True}, divisible=("tokens_per_page",)),
    *(Build(step_kernel, TYPES, STEP | more, divisible=("tokens_per_page",)) for more in (NO_DRAFTS, {})),
    Build(step_kernel, TYPES, STEP | NO_DRAFTS | dict.fromkeys(("table_ptr", "block_table_out", "slots_out"))),
]
