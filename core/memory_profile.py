"""How much memory the cache gets: what is left beside weights, the largest step and the graphs, which are measured before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelrunner.errors import CapacityError

GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device's memory, measured with everything in place but the cache.

    total: of the device. share: of it that may be filled (cache.memory_fraction). free: now, the largest step's memory given back. weights:
    of the model. step: what the largest step takes beside what stays. graphs: what captured graphs will take. tokens, rows: of that step.
    """

    device: str
    total: int
    share: float
    free: int
    weights: int
    step: int
    graphs: int
    tokens: int
    rows: int

    @property
    def allowed(self) -> int:
        return int(self.total * self.share)

    @property
    def others(self) -> int:
        """Taken by whatever else: buffers of the engine, CUDA itself, other programs."""
        return self.total - self.free - self.weights

    @property
    def left(self) -> int:
        """For the cache; negative if there is not even room for the rest."""
        return self.allowed - self.weights - self.others - self.step - self.graphs

    def __str__(self) -> str:
        return (
            f"weights {gib(self.weights)}, the largest step ({self.tokens} tokens, {self.rows} rows) {gib(self.step)}, graphs "
            f"{gib(self.graphs)}, buffers and others {gib(self.others)}, left for the cache {gib(self.left)}; {gib(self.allowed)} of "
            f"{gib(self.total)} may be filled"
        )


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def misfit(use: MemoryUse, needed: int) -> CapacityError:
    """The error for a model beside which the cache has less than the `needed` bytes of its smallest size."""
    advice = ["lower scheduler.max_batched_tokens or scheduler.max_rows for a smaller step"] if use.step > use.total // 50 else []
    advice += ["graphs.max_tokens or graphs.eager for fewer graphs"] if use.graphs > use.total // 50 else []
    advice += [f"raise cache.memory_fraction (now {use.share:g})"] if use.share < 0.95 else []
    advice += ["free what other programs hold"] if use.others > use.total // 10 else []
    advice += ["take a model, a model.dtype or a linear.scheme with smaller weights, or a device with more memory"]
    return CapacityError(
        f"the model does not fit on device {use.device!r} with a cache of at least {needed} bytes. {use}. To change that: "
        f"{'; '.join(advice)}"
    )


def no_room(device: str, free: int, total: int, doing: str, advice: str, error: BaseException) -> CapacityError:
    """The error for memory that ran out before anything could be counted. doing: what was going on."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CapacityError(f"device {device!r} ran out of memory {doing}: {gib(free)} of {gib(total)} were free before. {advice} ({first})")


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers; tensors that share their memory count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers())}
    return sum(storages.values())
