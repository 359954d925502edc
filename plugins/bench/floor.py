"""The least time that a workload can take on a device: bytes over bandwidth, products over their rate.

A step reads every weight once and computes its products, whichever takes longer; and reads the cache of its rows once, or computes
their attention, whichever takes longer. Steps are those of a scheduler that admits in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from modelrunner.plugins.bench.scenarios import Job

if TYPE_CHECKING:
    from modelrunner.engine import Engine

Products = Callable[[int], float]  # rows -> seconds of all products of a decode step


@dataclass(frozen=True)
class ModelCost:
    """What a model moves and computes. body: linear layers but the head. flops: multiplications and additions.

    body_bytes, head_bytes: of weights. body_flops: per token; head_flops: per sampled row. kv_bytes: of the cache, per token of context.
    pair_flops: of attention, per query token and token it sees.
    """

    body_bytes: int
    head_bytes: int
    body_flops: int
    head_flops: int
    kv_bytes: float
    pair_flops: int


@dataclass(frozen=True)
class StepWork:
    """tokens: queries. rows: sampled ones. context: tokens whose cache is read, over all rows. pairs: query tokens times tokens seen."""

    tokens: int
    rows: int
    context: int
    pairs: int


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes a second, read and written. flops: a second."""

    bandwidth: float
    flops: float


def cost_of(engine: Engine) -> ModelCost | None:
    """The cost of an engine's model; None for a model without `Linear` layers, whose products are not known here.

    Every layer is counted as run once a step, and every cache group as one of full attention.
    """
    from modelrunner.linear import Linear
    from modelrunner.model_state import FullAttention

    module, vocab_size = engine.assembly.state.module, engine.assembly.needs.vocab_size
    sizes = {True: [0, 0], False: [0, 0]}
    for layer in module.modules():
        if isinstance(layer, Linear):
            tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            total = sizes[layer.out_features == vocab_size]
            total[0] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            total[1] += 2 * layer.in_features * layer.out_features
    if not sizes[False][1]:
        return None
    resolved, layouts = engine.assembly.resolved, engine.assembly.layouts
    groups = [layout.group for layout in layouts if isinstance(layout.group, FullAttention)]
    kv_bytes = sum(resolved.page_bytes / layout.tokens_per_page for layout in layouts if isinstance(layout.group, FullAttention))
    pair_flops = sum(4 * len(group.layers) * group.num_heads * group.head_dim for group in groups)
    return ModelCost(sizes[False][0], sizes[True][0], sizes[False][1], sizes[True][1], kv_bytes, pair_flops)


def schedule(jobs: Sequence[Job], max_rows: int, max_tokens: int) -> Iterator[StepWork]:
    """The steps of an ideal scheduler: every row decodes, what is left of `max_tokens` goes to prompts in order of arrival."""
    prompt = np.array([len(job.prompt) for job in jobs], np.int64)
    limit = prompt + np.array([job.output for job in jobs], np.int64)
    known, computed = prompt.copy(), np.zeros_like(prompt)
    active = np.zeros(len(jobs), np.bool_)
    admitted = 0
    while admitted < len(jobs) or active.any():
        free = max_rows - int(np.count_nonzero(active))
        running = np.concatenate([np.flatnonzero(active), np.arange(admitted, min(admitted + free, len(jobs)))])
        pending = known[running] - computed[running]
        running = running[np.argsort(pending > 1, kind="stable")]  # those that decode come first
        pending = known[running] - computed[running]
        chunk = np.clip(max_tokens - (np.cumsum(pending) - pending), 0, pending)
        running, chunk = running[chunk > 0], chunk[chunk > 0]
        admitted = max(admitted, int(running.max()) + 1)
        active[running] = True
        computed[running] += chunk
        sampled = running[computed[running] == known[running]]
        after = computed[running]
        yield StepWork(int(chunk.sum()), sampled.size, int(after.sum()), int((chunk * (after - chunk) + chunk * (chunk + 1) // 2).sum()))
        known[sampled] += 1
        active[sampled[known[sampled] == limit[sampled]]] = False


def floor_seconds(steps: Sequence[StepWork], cost: ModelCost, machine: Machine, products: Products | None = None) -> float:
    """The least time for `steps`. products: measured times of a library's products, which then stand for those of pure decode steps."""
    return sum(step_floor(step, cost, machine, products) for step in steps)


def step_floor(step: StepWork, cost: ModelCost, machine: Machine, products: Products | None = None) -> float:
    """Seconds of one step."""
    weights = cost.body_bytes + (cost.head_bytes if step.rows else 0)
    flops = cost.body_flops * step.tokens + cost.head_flops * step.rows
    layers = max(weights / machine.bandwidth, flops / machine.flops)
    if products is not None and step.tokens == step.rows:
        layers = max(layers, products(step.rows))
    attention = max(step.context * cost.kv_bytes / machine.bandwidth, step.pairs * cost.pair_flops / machine.flops)
    return layers + attention


def interpolated(measured: dict[int, float]) -> Products:
    """Seconds of the products at any number of rows, on straight lines between the measured ones and level beyond them."""
    rows = sorted(measured)
    seconds = [measured[row] for row in rows]
    return lambda number: float(np.interp(number, rows, seconds))
