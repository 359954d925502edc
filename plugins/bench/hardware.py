"""What the device itself reaches: copies, and the products of a model by torch. The ground that floors stand on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

from modelrunner.plugins.bench.floor import Machine

if TYPE_CHECKING:
    import torch

    from modelrunner.engine import Engine

COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes: beyond every cache
SQUARES = {"cuda": 8192, "cpu": 512}  # rows of a matrix
RATES = {"H200": 650e12}  # of bfloat16, over a model's layers at 8,192 rows
REPEATS = 10


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median seconds of `work`, which was run once before. On a GPU by its own clock."""
    import torch

    work()
    if device.type != "cuda":
        taken = []
        for _ in range(repeats):
            start = perf_counter()
            work()
            taken.append(perf_counter() - start)
        return statistics.median(taken)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(before.elapsed_time(after)) for before, after in pairwise(marks)) / 1000


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    import torch

    size = size or COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(partial(target.copy_, source), device)


def product_rate(device: torch.device, size: int | None = None) -> float:
    """Multiplications and additions a second: what large products of a model reach, known for some GPUs, else one square product's."""
    import torch

    for name, rate in RATES.items():
        if name in device_name(device):
            return rate
    size = size or SQUARES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / seconds_of(partial(torch.mm, left, right), device)


def free(device: torch.device) -> None:
    """Give memory that nobody uses back to a GPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> Machine:
    """Measure the device, while its memory is free."""
    measured = Machine(copy_bandwidth(device), product_rate(device))
    free(device)
    return measured


def product_seconds(engine: Engine, rows: int) -> float | None:
    """All matrix products of a decode step of `rows` rows, by torch (cuBLAS on a GPU, in a captured graph): seconds.

    Over the engine's own weights, so that each is read from memory as in a step. None for weights that are not stored as floats.
    """
    import torch

    from modelrunner.linear import Linear

    layers = [layer for layer in engine.assembly.state.module.modules() if isinstance(layer, Linear)]
    if not layers or not all(isinstance(getattr(layer, "weight", None), torch.Tensor) for layer in layers):
        return None
    weights = [layer.weight.data for layer in layers]
    device, dtype = weights[0].device, weights[0].dtype
    inputs = {size: torch.randn(rows, size, dtype=dtype, device=device) for size in {w.shape[1] for w in weights}}
    outputs = {size: torch.empty(rows, size, dtype=dtype, device=device) for size in {w.shape[0] for w in weights}}

    def products() -> None:
        for weight in weights:
            torch.mm(inputs[weight.shape[1]], weight.t(), out=outputs[weight.shape[0]])

    with torch.inference_mode():
        if device.type != "cuda":
            return seconds_of(products, device, repeats=3)
        return captured_seconds(products, device)


def captured_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Median seconds of `work` as a CUDA graph."""
    import torch

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds_of(graph.replay, device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that torch has held on a GPU; None elsewhere."""
    import torch

    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
