"""What the area `automata` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.automata.walk import (
    ROWS,
    TOKENS,
    WORDS,
    _close_states,
    _draft_states,
    _mask_states,
    _walk_tokens,
    draft_states,
    mask_states,
    walk_tokens,
)
from modelrunner.kernels.builds import Build

OVERRIDES: dict[str, Callable[..., Any]] = {"draft_states": draft_states, "mask_states": mask_states, "walk_tokens": walk_tokens}

TYPES = dict.fromkeys(
    ("rows", "num_tokens", "states", "token_start", "stops", "ends", "masks", "computed", "query_len", "token_ids", "out"), "*i32"
)
TYPES |= {"samples": "*i1", "ok": "*i1", "tokens": "*i64", "edges": "*i16"}
TYPES |= dict.fromkeys(("closed", "accepting", "token_bytes"), "*u8")
TYPES |= dict.fromkeys(("first", "vocab", "words", "num_rows", "stride", "longest"), "i32")

BUILDS: list[Build] = [
    Build(_mask_states, TYPES, {"TOKENS": TOKENS}),
    Build(_close_states, TYPES, {"WORDS": WORDS}),
    Build(_walk_tokens, TYPES, {"num_tokens": None, "K1": 1, "ROWS": ROWS, "PDL": True}, num_warps=1),
    Build(_walk_tokens, TYPES, {"K1": 1, "ROWS": ROWS, "PDL": True}, num_warps=1),
    *(Build(_draft_states, TYPES, {"K1": slots, "ROWS": ROWS, "PDL": True}, num_warps=1) for slots in (2, 4, 6)),
    Build(_walk_tokens, TYPES, {"K1": 5, "ROWS": ROWS, "PDL": True}, num_warps=1),
]
