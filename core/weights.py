"""Weight maps: which checkpoint tensor goes where, told once by a ModelState and used for every (re)load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    path: dotted path of a `Linear` or a parameter in the module, e.g. `layers.3.qkv`. part: which part of a fused Linear.
    kind: `weight` or `bias` of a Linear; `parameter` for a plain parameter. transform: applied first, e.g. a row permutation.
    shard_dim: dimension that is split over devices, None for a replicated tensor.
    """

    path: str
    part: int = 0
    kind: str = "weight"
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    shard_dim: int | None = None


@dataclass(frozen=True)
class WeightMap:
    """names: checkpoint name -> targets (several for tied weights). ignored: names that may be present and are not used (prefixes end in `*`)."""

    names: Mapping[str, tuple[Target, ...]]
    ignored: tuple[str, ...] = ()
    optional: frozenset[str] = field(default_factory=frozenset)
