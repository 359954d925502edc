"""The built-in attention backend: paged attention through the named operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.attention import AttentionBackend
    from modelrunner.device import Device
    from modelrunner.model_state import CacheGroup
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"


def _paged() -> type[AttentionBackend]:
    from modelrunner.backends.paged import PagedAttention

    return PagedAttention


FLOAT8_SINCE = (8, 9)  # compute capability: older GPUs have no instructions for it, and Triton makes none


@hookimpl
def attention_backend(group: CacheGroup, device: Device, settings: RunnerSettings) -> Offer[type[AttentionBackend]] | Decline:
    from modelrunner.model_state import FullAttention

    if not isinstance(group, FullAttention):
        return Decline(f"paged: runs FullAttention and SlidingWindow groups, not {type(group).__name__}")
    if settings.cache.dtype == "float8_e4m3fn" and device.type == "cuda":
        import torch

        if (found := torch.cuda.get_device_capability(device.torch_device)) < FLOAT8_SINCE:
            needed, has = ".".join(map(str, FLOAT8_SINCE)), ".".join(map(str, found))
            return Decline(f"paged: cache.dtype float8_e4m3fn needs compute capability {needed}; device {device.name!r} has {has}")
    return Offer("paged", _paged, fit="family", reason="named operations over pages; any device")
