"""Where the tensors of encoders go: targets of products and norms with biases."""

from __future__ import annotations

from functools import partial

import torch

from modelrunner.model_states.common.decoder_weights import Targets
from modelrunner.weights import Target


def linear_targets(source: str, target: str, part: int | None = 0, *, bias: bool = True, flatten: bool = False) -> Targets:
    """A product's weight and bias. flatten: the weight is that of a convolution without overlap, one line for each output."""
    weight = Target(target, part, transform=partial(torch.flatten, start_dim=1) if flatten else None)
    return {f"{source}.weight": (weight,), **({f"{source}.bias": (Target(target, part, "bias"),)} if bias else {})}


def norm_targets(source: str, target: str, *, bias: bool = True) -> Targets:
    """A norm's weight, and bias if it has one."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{source}.{kind}": (Target(f"{target}.{kind}", kind="parameter"),) for kind in kinds}
