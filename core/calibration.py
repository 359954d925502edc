"""Scales for a cache in 8 bits from what a model does: prompts run once, and the largest key and value of each head are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.attention import AttentionBackend, AttentionMeta
from modelrunner.errors import RequestError
from modelrunner.request import Prompt, SamplingParams

if TYPE_CHECKING:
    from modelrunner.llm import LLM

LARGEST = 448.0  # of float8_e4m3fn
HEADROOM = 2.0  # times what was seen: other prompts may have larger ones, and a floating-point type loses nothing by it
MAX_PASSES = 3


class Observing(AttentionBackend):
    """Attends as `inner` does, and notes the largest absolute key and value of each layer and head in `largest`, shaped like its scales."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.group, inner.cache, inner.ops, inner.dtype)
        assert inner.scales is not None
        self.inner = inner
        self.largest = torch.zeros_like(inner.scales)

    def begin(self, meta: AttentionMeta) -> tuple[torch.Tensor, Any]:
        return (meta.slots >= 0).view(-1, 1, 1), self.inner.begin(meta)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        written, inner = step
        for seen, part in zip(self.largest[layer], (k, v), strict=True):
            torch.maximum(seen, torch.where(written, part.abs(), 0.0).amax((0, 2)).float(), out=seen)
        return self.inner.attend(q, k, v, layer, inner) if sinks is None else self.inner.attend(q, k, v, layer, inner, sinks)


def calibrate(llm: LLM, prompts: Prompt | Sequence[Prompt]) -> Mapping[str, torch.Tensor]:
    """`LLM.calibrate_cache`."""
    engine = llm.engine
    scales, scheduler, runner, device = engine.assembly.scales, engine.scheduler, engine.runner, engine.assembly.device
    if not scales.by_group:
        raise RequestError(
            f"calibrate_cache: the cache is of {engine.assembly.resolved.cache_dtype}, which takes no scales; accepted: an engine with "
            "cache.dtype=float8_e4m3fn"
        )
    if engine.has_unfinished():
        raise RequestError("calibrate_cache: requests are open, and new scales would void what the cache holds of them; finish them first")
    for _ in range(MAX_PASSES):
        observed = {name: Observing(backend) for name, backend in runner.parts.backends.items() if name in scales.by_group}
        scheduler.reset_prefix_cache()
        engine.drain()
        with runner.instead(observed):
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            engine.drain()
        device.synchronize()
        fitted = True
        for name, backend in observed.items():
            fitted &= bool((backend.largest <= LARGEST * scales.by_group[name]).all())
            scales.by_group[name].copy_(scales_for(backend.largest, scales.by_group[name]))
        if fitted:  # else later layers saw keys and values cut short
            break
    scheduler.reset_prefix_cache()
    device.synchronize()
    return scales.named()


def scales_for(largest: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The power of 2 that brings `largest` and some more into the type's range; heads that were always zero keep theirs."""
    fitting = torch.exp2(torch.log2(largest * (HEADROOM / LARGEST)).ceil())
    return torch.where((largest > 0) & largest.isfinite(), fitting, before)
