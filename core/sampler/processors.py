"""The logits processors of plugins, as one stage of the sampler: who asks for which, and calling them in a step."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.batch import PROCESSOR_BIT, Feature
from modelrunner.errors import PluginError, RequestError, kind_of
from modelrunner.logits_processors import LogitsProcessor
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage
from modelrunner.sampling_values import FUNCTIONS

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings

MAX_PROCESSORS = 20


class ProcessorRegistry:
    """Collects the processors of plugins; it is a `RegisterProcessor`, and `for_plugin(name)` is one that speaks for a plugin.

    found: (plugin, processor), in order of registration.
    """

    def __init__(self, plugin: str = "this process") -> None:
        self.plugin = plugin
        self.found: list[tuple[str, LogitsProcessor]] = []

    def for_plugin(self, plugin: str) -> ProcessorRegistry:
        """A view of this registry whose registrations belong to `plugin`."""
        view = ProcessorRegistry(plugin)
        view.found = self.found
        return view

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that puts back what is registered now."""
        kept = len(self.found)

        def restore() -> None:
            del self.found[kept:]

        return restore

    def __call__(self, processor: LogitsProcessor) -> None:
        if not isinstance(processor, LogitsProcessor):
            raise PluginError(
                f"plugin {self.plugin!r} registers {kind_of(processor)} as a logits processor; accepted: an instance of a subclass "
                "of modelrunner.logits_processors.LogitsProcessor"
            )
        name = processor.name
        if not isinstance(name, str) or not name.isidentifier() or name == FUNCTIONS:
            raise PluginError(
                f"plugin {self.plugin!r} registers a logits processor ({type(processor).__name__}) with the name {name!r}; accepted: a "
                f"Python identifier other than {FUNCTIONS!r}"
            )
        for owner, other in self.found:
            if other.name == name:
                raise PluginError(
                    f"{owner!r} and {self.plugin!r} both register the logits processor {name!r}; rename one, or disable one plugin"
                )
        if len(self.found) == MAX_PROCESSORS:
            raise PluginError(f"plugin {self.plugin!r} registers the logits processor {name!r}; an engine holds at most {MAX_PROCESSORS}")
        self.found.append((self.plugin, processor))


class Processors(Stage):
    """All processors, each with a bit of its own and the column `processor.<name>`, 1 for rows that ask."""

    def __init__(self, found: ProcessorRegistry) -> None:
        self._owners = {processor.name: plugin for plugin, processor in found.found}
        self.processors = {processor.name: processor for _, processor in found.found}
        self.bits = {name: Feature(PROCESSOR_BIT << i) for i, name in enumerate(self.processors, start=1)}
        self.feature = Feature(sum(self.bits.values()))
        self.uncaptured = Feature(sum(bit for name, bit in self.bits.items() if not self.processors[name].captured))
        self.undrafted = Feature(sum(bit for name, bit in self.bits.items() if not self.processors[name].drafts))

    @property
    def acts(self) -> bool:
        return bool(self.processors)  # its feature would be none, and that means always

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        own = [Column(f"processor.{name}", torch.int32) for name in self.processors]
        return (*own, *(column for processor in self.processors.values() for column in processor.columns(settings)))

    def check(self, request: Request, settings: RunnerSettings) -> None:
        for name in request.params.logits_processors:
            if name not in self.processors and name != FUNCTIONS:
                known = ", ".join(map(repr, self.processors)) or "functions alone, since no plugin brings a processor"
                raise RequestError(f"logits_processors: no logits processor is named {name!r}; accepted: {known}")

    def row_values(self, request: Request) -> Mapping[str, Any]:
        values: dict[str, Any] = {}
        for name, processor in self.processors.items():
            if name in request.params.logits_processors:
                try:
                    own = processor.row_values(request, request.params.logits_processors[name])
                except (ValueError, TypeError, KeyError) as error:
                    raise RequestError(f"logits_processors[{name!r}]: {error}") from error
                values |= {f"processor.{name}": 1, **own}
        return values

    def features(self, params: SamplingParams) -> Feature:
        found = Feature.GREEDY
        for name in params.logits_processors:
            found |= self.bits.get(name, Feature.GREEDY)
        return found

    def edit(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        for name, bit in self.bits.items():
            if bit & batch.features:
                changed = self._apply(name, logits, batch)
                if changed is not logits:
                    self._check(name, changed, logits)
                    logits = changed
        return logits

    def _apply(self, name: str, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        try:
            return self.processors[name].apply(logits, batch)
        except (Exception, CancelledError) as error:
            raise PluginError(
                f"logits processor {name!r} of plugin {self._owners[name]!r} failed: {type(error).__name__}: {error}"
            ) from error

    def _check(self, name: str, changed: object, logits: torch.Tensor) -> None:
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape or changed.dtype != logits.dtype:
            got = f"{list(changed.shape)} {changed.dtype}" if isinstance(changed, torch.Tensor) else kind_of(changed)
            raise PluginError(
                f"logits processor {name!r} of plugin {self._owners[name]!r} gave {got}; {list(logits.shape)} {logits.dtype} is needed"
            )
