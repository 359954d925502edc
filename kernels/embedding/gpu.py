"""What the area `embedding` gives to CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelrunner.kernels.builds import Build
from modelrunner.kernels.embedding.lookup import embedding, embedding_kernel

OVERRIDES: dict[str, Callable[..., Any]] = {"embedding": embedding}


def _build(weight: str, out: str, width: int, block: int) -> Build:
    types = {"ids_ptr": "*i64", "weight_ptr": weight, "out_ptr": out, "weight_stride": "i32", "out_stride": "i32"}
    return Build(embedding_kernel, types, {"WIDTH": width, "BLOCK": block, "PDL": True}, divisible=("weight_stride", "out_stride"))


BUILDS = [
    _build("*bf16", "*bf16", 1024, 1024),
    _build("*bf16", "*bf16", 576, 1024),
    _build("*fp16", "*fp16", 4096, 1024),
    _build("*bf16", "*fp32", 4096, 1024),
    _build("*fp32", "*fp32", 1024, 1024),
    _build("*fp32", "*fp32", 128, 128),
]
