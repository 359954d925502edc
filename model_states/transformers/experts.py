"""Mixtures of experts whose products do not wait for the device.

transformers multiplies by all experts with torch's grouped product. On a GPU torch has a kernel for that in bfloat16 alone; for other
types it reads on the host where each expert's tokens end. There each token's experts are gathered instead, and multiplied as a batch.

Dimension letters: T tokens, K experts of a token, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

GATHERED_BYTES = 1 << 28  # of the largest weight, copied for the tokens of one part


def grouped_product_waits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product of `dtype` makes the host wait for `device`."""
    return device.type == "cuda" and dtype != torch.bfloat16


@contextmanager
def experts_function(name: str) -> Iterator[None]:
    """transformers knows `batched_in_parts` as the experts implementation `name` while the block runs, and not after it."""
    ALL_EXPERTS_FUNCTIONS[name] = batched_in_parts
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS.pop(name)


def batched_in_parts(experts: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' batched product for a few tokens at a time, because it copies each token's experts.

    experts: the module, with weights [E, ., .]. hidden [T, H], chosen (expert ids) and weights [T, K] -> [T, H]. How many tokens go
    together depends on shapes alone.
    """
    size = max(tensor[0].nbytes for tensor in chain(experts.parameters(False), experts.buffers(False)) if tensor.ndim == 3)
    tokens = max(1, GATHERED_BYTES // (size * chosen.shape[-1]))
    parts = zip(hidden.split(tokens), chosen.split(tokens), weights.split(tokens), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *part) for part in parts])
