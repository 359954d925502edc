"""What the area `embedding` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.embedding.lookup import embedding, embedding_kernel
from modelrunner.kernels.embedding.media import TOKENS, add_media, media_kernel, media_positions, place_media, positions_kernel

OVERRIDES: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "place_media": place_media,
    "add_media": add_media,
    "media_positions": media_positions,
}


def _build(weight: str, out: str, width: int, block: int) -> Build:
    types = {"ids_ptr": "*i64", "weight_ptr": weight, "out_ptr": out, "weight_stride": "i32", "out_stride": "i32"}
    return Build(embedding_kernel, types, {"WIDTH": width, "BLOCK": block, "PDL": True}, divisible=("weight_stride", "out_stride"))


def _media(dtype: str, add: bool, width: int, block: int) -> Build:
    types = {"out_ptr": dtype, "arena_ptr": dtype, "slots_ptr": "*i32", "out_stride": "i32", "arena_stride": "i32"}
    constants = {"ADD": add, "WIDTH": width, "BLOCK": block, "PDL": True}
    return Build(media_kernel, types, constants, divisible=("out_stride", "arena_stride"))


_POSITIONS = {
    "given_ptr": "*i32", "positions_ptr": "*i64", "token_row_ptr": "*i64", "rows_ptr": "*i32", "delta_ptr": "*i32", "out_ptr": "*i64",
    "T": "i32", "given_stride": "i32", "out_stride": "i32",
}  # fmt: skip

BUILDS = [
    _build("*bf16", "*bf16", 1024, 1024),
    _build("*bf16", "*bf16", 576, 1024),
    _build("*fp16", "*fp16", 4096, 1024),
    _build("*bf16", "*fp32", 4096, 1024),
    _build("*fp32", "*fp32", 1024, 1024),
    _build("*fp32", "*fp32", 128, 128),
    *(_media(dtype, add, width, 1024) for dtype in ("*bf16", "*fp16", "*fp32") for add in (False, True) for width in (2048, 2560)),
    Build(positions_kernel, _POSITIONS, {"BLOCK": TOKENS, "PDL": True}),
]
