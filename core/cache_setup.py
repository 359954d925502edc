"""The cache at start-up: how many pages it gets, its memory, and the attention backends that work on it.

Where a device can measure what its work takes (`Device.measures`) and no setting gives the size, the engine is first put together with
the smallest cache; the largest step runs on it, and the cache gets what then turns out to be left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from modelrunner.attention import AttentionBackend
from modelrunner.cache_scales import CacheScales
from modelrunner.caches import Arena, allocate_caches
from modelrunner.device import Device
from modelrunner.errors import CapacityError
from modelrunner.memory_profile import MemoryUse, gib, misfit, no_room, weight_bytes
from modelrunner.ops import Ops
from modelrunner.page_pool import GroupLayout
from modelrunner.settings import RunnerSettings

if TYPE_CHECKING:
    from modelrunner.runner import Runner

LEAST_PAGES = 1  # beside the null page
LAYER_BYTES = 1 << 19  # of a layer's launches in a captured graph, beside what they allocate (28 layers: 12.7 MiB a graph on an H200)


@dataclass(frozen=True)
class Cache:
    """arena: of num_pages + 1 pages. views: of it, by group. backends: what attends over each."""

    num_pages: int
    arena: Arena
    views: Mapping[str, torch.Tensor]
    backends: Mapping[str, AttentionBackend]


def check_budget(device: Device, budget: int, page_bytes: int) -> None:
    """Raise CapacityError for a cache of so many bytes that holds no page beside the null page."""
    if budget // page_bytes - 1 < LEAST_PAGES:
        free, total = device.memory()
        raise CapacityError(
            f"the cache would get {max(budget, 0)} bytes, less than the 2 pages of {page_bytes} bytes that it needs at least; device "
            f"{device.name!r} has {free} of {total} bytes free. Set cache.memory_bytes or cache.num_pages, or free memory"
        )


@dataclass(frozen=True)
class CacheMaker:
    """What a cache is made from. dtype: of queries. cache_dtype: of what is stored. backends: class of each group's backend. scales: where
    that has 8 bits."""

    device: Device
    ops: Ops
    settings: RunnerSettings
    layouts: Sequence[GroupLayout]
    page_bytes: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    backends: Mapping[str, type[AttentionBackend]]
    max_model_len: int
    scales: CacheScales

    @property
    def measured(self) -> bool:
        """Whether its size is to be measured."""
        cache = self.settings.cache
        return self.device.measures and cache.num_pages is None and cache.memory_bytes is None

    def make(self, num_pages: int) -> Cache:
        """Allocate a cache of so many pages and the null page. Raises CapacityError."""
        try:
            arena, views = allocate_caches(
                self.layouts, num_pages + 1, self.page_bytes, self.cache_dtype, self.device.torch_device, self.dtype
            )
        except (RuntimeError, OSError, MemoryError) as error:
            raise CapacityError(
                f"the cache of {num_pages} pages of {self.page_bytes} bytes does not fit on device {self.device.name!r}; lower "
                f"cache.num_pages or cache.memory_bytes ({error})"
            ) from error
        groups = {group.name: group for layout in self.layouts for group in layout.groups}
        backends: dict[str, AttentionBackend] = {}
        for name, kind in self.backends.items():
            backends[name] = kind(groups[name], views[name], self.ops, self.dtype)  # type: ignore[arg-type]
            backends[name].scales = self.scales.by_group.get(name)
        return Cache(num_pages, arena, views, backends)

    def make_first(self) -> Cache:
        """The cache to start with: the smallest one, if its size is to be measured."""
        if self.measured:
            return self.make(LEAST_PAGES)
        cache, pages = self.settings.cache, self.settings.cache.num_pages
        if pages is None:
            budget = self.device.cache_budget(cache.memory_fraction) if cache.memory_bytes is None else cache.memory_bytes
            check_budget(self.device, budget, self.page_bytes)
            pages = self.pages_of(budget)
        return self.make(pages)

    def pages_of(self, budget: int) -> int:
        """Usable pages in so many bytes, but never more than all rows at full length could use."""
        most = self.settings.scheduler.max_rows * sum(layout.pages_for(self.max_model_len) for layout in self.layouts)
        return min(most, budget // self.page_bytes - 1)  # one page is the null page

    def enlarge(self, runner: Runner, encode: Callable[[], None] | None = None) -> tuple[Cache, MemoryUse]:
        """Measure, and give the runner a cache that fills what is left. After its warm-up, before it captures. Raises CapacityError.

        encode: the largest work beside a step.
        """
        use = self.measure(runner, encode)
        pages = self.pages_of(use.left)
        if pages < LEAST_PAGES:
            raise misfit(use, (1 + LEAST_PAGES) * self.page_bytes)
        cache = self.make(pages)
        runner.use_caches(cache.views, cache.backends)
        return cache, use

    def measure(self, runner: Runner, encode: Callable[[], None] | None = None) -> MemoryUse:
        """Run the largest step, and the largest one that will be captured, and count what they take; what runs beside a step shares no
        memory with it."""
        device, settings = self.device, self.settings
        tokens, rows = settings.scheduler.max_batched_tokens, settings.scheduler.max_rows
        free, total = device.memory()
        try:
            step = device.peak(lambda: runner.run_large(tokens)) + (device.peak(encode) if encode is not None else 0)
            captured = runner.graphs.most_tokens
            graphs = device.peak(lambda: runner.run_large(captured)) if captured else 0
        except (RuntimeError, OSError, MemoryError) as error:
            if not isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            advice = (
                "Lower scheduler.max_batched_tokens or scheduler.max_rows, or take a model, a model.dtype or a linear.scheme with smaller "
                f"weights ({gib(weight_bytes(runner.state.module))} now)"
            )
            doing = f"in the largest step, of {tokens} tokens and {rows} rows"
            raise no_room(device.name, free, total, doing, advice, error) from error
        graphs += runner.graphs.count * LAYER_BYTES * sum(len(group.layers) for layout in self.layouts for group in layout.groups)
        free, total = device.memory()
        share = settings.cache.memory_fraction
        return MemoryUse(device.name, total, share, free, weight_bytes(runner.state.module), step, graphs, tokens, rows)
